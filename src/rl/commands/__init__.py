"""The subcommands of `rl`. They may use every other room; none of those uses them."""
