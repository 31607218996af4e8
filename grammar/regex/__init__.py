"""Regular expressions as ECMA-262 reads them. Complements, intersections and look-around are rewritten."""
