"""Programs that tasks bring into a sandbox: tool servers and web sites."""
