"""Software engineering tasks in real repositories, made from source packages or read from published sets."""
