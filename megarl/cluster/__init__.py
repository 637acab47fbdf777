"""Where the roles live: STRICT_PACK placement groups on Ray, and one actor per rank and per server in them."""
