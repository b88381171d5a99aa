"""Reports of a run or a recording: `recording` reads, the other modules write text, Markdown, HTML and CSV."""
