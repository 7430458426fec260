package mysqllock_test

func runChild(string) int { return 2 }
