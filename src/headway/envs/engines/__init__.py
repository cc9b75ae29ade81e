"""The policy that is trained, behind engines: which of them is asked, and how far a reply has come."""
