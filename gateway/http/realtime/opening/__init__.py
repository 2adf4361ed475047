"""How sessions begin: how many there may be, and the ephemeral keys that open them."""
