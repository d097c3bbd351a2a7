"""Tools for operators: the doctor, services, the list of runs, and exports of their models."""
