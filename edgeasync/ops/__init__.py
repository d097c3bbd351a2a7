"""What an operator runs beside a fleet: the doctor, services, lists of runs, and models taken out of them."""
