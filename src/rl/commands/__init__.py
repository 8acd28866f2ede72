"""The subcommands of `rl` that play a policy without training it. They may use every other package; none of those uses them."""
