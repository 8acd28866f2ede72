"""The browser page over run directories: a server that reads them, and the page that it serves."""
