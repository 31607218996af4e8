"""Regular expressions as ECMA-262 reads them: complements, intersections and look-around made plain."""
