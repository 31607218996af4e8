"""Objects and arrays whose members are counted or distinguished: rules with a parameter of 64 bits."""
