"""Tools for operators: the doctor, services, the list of runs, and the models in their folders."""
