"""What a job's exchanges ask of a link, as formulas: for `diloco plan`, and for judging measured links.

Numbers in, numbers out: no network, no clock, no files."""
