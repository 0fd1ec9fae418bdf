"""Sound algorithms of strangers, of which the kit must say nothing: what is unusual in them is meant."""
