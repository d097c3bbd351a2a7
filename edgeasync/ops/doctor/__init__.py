"""`edgeasync doctor`: checks of a device, and remedies."""
