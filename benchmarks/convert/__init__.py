"""Token formats written and read by `forebay convert`, and by the libraries whose formats they are."""
