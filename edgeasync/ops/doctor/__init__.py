"""`edgeasync doctor`: checks a device, and suggests remedies."""
