"""The browser page of run directories: the page, and a server that reads them."""
