"""Trust in strangers: checks of their contributions, their standing, and the ledger of both."""
