"""Commands beside training: the memory of a run, checks of datasets and of the installation, chats, exported models."""
