"""One definition of every number StemKV prints."""
