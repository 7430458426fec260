package fakeserver

import "github.com/go-sql-driver/mysql"

// The numbers of the errors, which the server calls as the comments say.
const (
	unknownThread    = 1094 // ER_NO_SUCH_THREAD
	deadlock         = 1213 // ER_LOCK_DEADLOCK
	severalRows      = 1242 // ER_SUBQUERY_NO_1_ROW
	unknownSavepoint = 1305 // ER_SP_DOES_NOT_EXIST
	queryInterrupted = 1317 // ER_QUERY_INTERRUPTED
	openTransaction  = 1568 // ER_CANT_CHANGE_TX_CHARACTERISTICS
	lockedNowait     = 3572 // ER_LOCK_NOWAIT
)

// notNow is the error of a statement that does not wait for a lock.
func notNow() error {
	return &mysql.MySQLError{
		Number:  lockedNowait,
		Message: "Statement aborted because lock(s) could not be acquired immediately and NOWAIT is set.",
	}
}

// stopped is the error of a guard whose condition is not true.
func stopped() error {
	return &mysql.MySQLError{Number: severalRows, Message: "Subquery returns more than 1 row"}
}

func deadlocked() error {
	return &mysql.MySQLError{Number: deadlock, Message: "Deadlock found when trying to get lock; try restarting transaction"}
}

func interrupted(why string) error {
	return &mysql.MySQLError{Number: queryInterrupted, Message: why}
}

func inTransaction() error {
	return &mysql.MySQLError{
		Number:  openTransaction,
		Message: "Transaction characteristics can't be changed while a transaction is in progress",
	}
}

func noSuchThread(id string) error {
	return &mysql.MySQLError{Number: unknownThread, Message: "Unknown thread id: " + id}
}

func noSavepoint(name string) error {
	return &mysql.MySQLError{Number: unknownSavepoint, Message: "SAVEPOINT " + name + " does not exist"}
}
