"""edgeasync: train one model across many unequal, unreliable devices, without waiting for any of them."""
