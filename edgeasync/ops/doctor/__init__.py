"""`edgeasync doctor`: measurements of a device, and what each of them means."""
