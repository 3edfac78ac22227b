"""What TileLang offers, row by row: understood, refused by name, or nothing that a kernel holds."""
