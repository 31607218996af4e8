"""Objects and arrays whose members are counted or told apart: rules with a parameter of 64 bits."""
