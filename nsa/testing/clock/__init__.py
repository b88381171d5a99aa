"""How long a call takes, by the host's clock (`timing`) and on a GPU (`cuda`), and which times are impossible."""
