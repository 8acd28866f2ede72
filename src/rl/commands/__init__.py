"""The subcommands of `rl`. They may import every other room; no other room imports them."""
