package server

// Numbers of errors that other packages tell apart, too, or look for, with what the server calls them.
// Most errors are known by what they mean: see [Locked], [Denied] and the others.
const (
	DuplicateColumn   = 1060 // ER_DUP_FIELDNAME
	ParseError        = 1064 // ER_PARSE_ERROR
	NoSuchThread      = 1094 // ER_NO_SUCH_THREAD: there is no such connection
	KillDenied        = 1095 // ER_KILL_DENIED_ERROR: it is another account's
	UnknownTable      = 1109 // ER_UNKNOWN_TABLE: of information_schema
	LockWaitTimeout   = 1205 // ER_LOCK_WAIT_TIMEOUT
	LockDeadlock      = 1213 // ER_LOCK_DEADLOCK: of rows and tables
	QueryInterrupted  = 1317 // ER_QUERY_INTERRUPTED
	NamedLockDeadlock = 3058 // ER_USER_LOCK_DEADLOCK
)
