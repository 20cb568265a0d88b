"""What every backend shares: the table of operators, and the row groups that operators take."""
