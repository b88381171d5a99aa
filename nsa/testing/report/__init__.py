"""What a run or a stored recording says: `recording` reads it, the other modules write text, Markdown, HTML and CSV."""
