"""What programs say to each other by gRPC: messages, limits, channels, bulk transfers, signed calls.

docs/protocol.md describes it for other languages. Bytes from the network are measured before they are parsed;
what a message means is decided by the syncer and the worker, never here."""
