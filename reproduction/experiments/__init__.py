"""One file for each topic of the paper: what is measured, and what the paper claims of it."""
