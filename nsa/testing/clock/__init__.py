"""How long does it take? By the host's clock (`timing`) and on a GPU (`cuda`), and what this hardware forbids."""
