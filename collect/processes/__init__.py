"""Programs: started in sessions of their own, followed line by line, ended with all of theirs."""
