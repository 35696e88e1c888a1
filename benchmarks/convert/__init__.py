"""Token formats written and read by `millrace convert`, and by the libraries whose formats they are."""
