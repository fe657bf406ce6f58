"""Who may talk to whom: credentials from files, names in certificates, the making of certificates.

No connection is made here; wire uses it for its channels. What a Secret holds is never logged."""
