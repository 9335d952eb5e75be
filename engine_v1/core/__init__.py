"""The scheduler and what it manages: requests' turns, token rows and cache blocks. Knows no torch."""
