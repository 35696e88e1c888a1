"""A whole network in virtual time, on the code that runs the real one."""
