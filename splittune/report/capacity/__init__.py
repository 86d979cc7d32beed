"""What people and spreadsheets read of a plan: rows, table, picture, console, progress."""
