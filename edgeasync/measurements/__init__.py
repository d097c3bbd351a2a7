"""What the hub has measured of each device and of the fleet: what policies decide by."""
