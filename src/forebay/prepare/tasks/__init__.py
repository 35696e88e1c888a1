"""The tasks of a preparation: pure functions of their input files, each named by a hash of all that it depends on."""
