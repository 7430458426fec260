package server

// Numbers of errors, with what the server calls them ("Server Error Message Reference" of MySQL, "Error Codes" of
// MariaDB). What an error means to a lock is what [Locked], [Denied] and the others say.
const (
	// Other packages tell these apart, too.
	DuplicateColumn   = 1060 // ER_DUP_FIELDNAME
	ParseError        = 1064 // ER_PARSE_ERROR
	NoSuchThread      = 1094 // ER_NO_SUCH_THREAD: there is no such connection
	KillDenied        = 1095 // ER_KILL_DENIED_ERROR: the connection is another account's
	UnknownTable      = 1109 // ER_UNKNOWN_TABLE: of information_schema
	LockWaitTimeout   = 1205 // ER_LOCK_WAIT_TIMEOUT, also of NOWAIT on MariaDB
	LockDeadlock      = 1213 // ER_LOCK_DEADLOCK: of rows and tables
	QueryInterrupted  = 1317 // ER_QUERY_INTERRUPTED: by KILL QUERY
	NamedLockDeadlock = 3058 // ER_USER_LOCK_DEADLOCK

	// Locks, limits and conflicts.
	rowChanged       = 1020 // ER_CHECKREAD: since the snapshot, with innodb_snapshot_isolation of MariaDB; the transaction is rolled back
	failedCommit     = 1180 // ER_ERROR_DURING_COMMIT
	lockTableFull    = 1206 // ER_LOCK_TABLE_FULL
	severalRows      = 1242 // ER_SUBQUERY_NO_1_ROW
	openTransaction  = 1568 // ER_CANT_CHANGE_TX_CHARACTERISTICS
	outOfRange       = 1690 // ER_DATA_OUT_OF_RANGE
	statementTimeout = 1969 // ER_STATEMENT_TIMEOUT: max_statement_time of MariaDB
	queryTimeout     = 3024 // ER_QUERY_TIMEOUT: MAX_EXECUTION_TIME
	hookFailed       = 3100 // ER_RUN_HOOK_ERROR: of Group Replication, before COMMIT
	commitConflict   = 3101 // ER_TRANSACTION_ROLLBACK_DURING_COMMIT: of Group Replication
	invalidJSON      = 3140 // ER_INVALID_JSON_TEXT
	lockedNowait     = 3572 // ER_LOCK_NOWAIT

	// TiDB's own.
	tidbNoRetry       = 8002 // a SELECT … FOR UPDATE cannot be run again after a conflict
	tidbConflict      = 8005 // a write conflict that TiDB sees before its storage does
	tidbRetryable     = 8022 // a COMMIT that may be tried again
	tidbTableChanged  = 8028 // DDL has changed a table meanwhile
	tidbLateDuplicate = 8147 // tidb_constraint_check_in_place_pessimistic is off: any failed statement rolls back
	tidbTooOld        = 8229 // the transaction is older than max-txn-ttl
	tidbWriteConflict = 9007 // a write conflict that the storage sees

	// Rights, and servers that do not write.
	cannotLock          = 1015 // ER_CANT_LOCK: innodb_read_only
	openReadOnly        = 1036 // ER_OPEN_AS_READONLY: innodb_read_only
	databaseDenied      = 1044 // ER_DBACCESS_DENIED_ERROR
	nodeNotReady        = 1047 // ER_UNKNOWN_COM_ERROR: a node of Galera without the others
	tableDenied         = 1142 // ER_TABLEACCESS_DENIED_ERROR
	columnDenied        = 1143 // ER_COLUMNACCESS_DENIED_ERROR
	privilegeDenied     = 1227 // ER_SPECIFIC_ACCESS_DENIED_ERROR: a global privilege
	optionPrevents      = 1290 // ER_OPTION_PREVENTS_STATEMENT: read_only
	routineDenied       = 1370 // ER_PROCACCESS_DENIED_ERROR
	needsSuper          = 1419 // ER_BINLOG_CREATE_ROUTINE_NEED_SUPER
	readOnlyTransaction = 1792 // ER_CANT_EXECUTE_IN_READ_ONLY_TRANSACTION
	readOnlyMode        = 1836 // ER_READ_ONLY_MODE
	nativeDenied        = 3566 // ER_NO_ACCESS_TO_NATIVE_FCT: of MySQL Router, which shares connections

	// What a server does not have, or does not do.
	handshakeFailed = 1043 // ER_HANDSHAKE_ERROR
	noDatabase      = 1049 // ER_BAD_DB_ERROR
	noColumn        = 1054 // ER_BAD_FIELD_ERROR
	unknownError    = 1105 // ER_UNKNOWN_ERROR: engines other than MySQL say no more
	noTable         = 1146 // ER_NO_SUCH_TABLE
	noVariable      = 1193 // ER_UNKNOWN_SYSTEM_VARIABLE
	notSupported    = 1235 // ER_NOT_SUPPORTED_YET
	noStatement     = 1243 // ER_UNKNOWN_STMT_HANDLER: no such prepared statement
	noAuthMode      = 1251 // ER_NOT_SUPPORTED_AUTH_MODE
	unpreparable    = 1295 // ER_UNSUPPORTED_PS
	doesNotExist    = 1305 // ER_SP_DOES_NOT_EXIST: no such routine, function or savepoint
	otherArguments  = 1318 // ER_SP_WRONG_NO_OF_ARGS: of a routine
	noDefiner       = 1449 // ER_NO_SUCH_USER: the definer of a routine is gone
	prepareAgain    = 1615 // ER_NEED_REPREPARE
	unconvertible   = 3854 // ER_CANNOT_CONVERT_STRING

	// Connections, and what servers run short of.
	diskFull            = 1021 // ER_DISK_FULL
	outOfMemory         = 1037 // ER_OUTOFMEMORY
	outOfSortMemory     = 1038 // ER_OUT_OF_SORTMEMORY
	tooManyConnections  = 1040 // ER_CON_COUNT_ERROR
	outOfResources      = 1041 // ER_OUT_OF_RESOURCES
	shutdown            = 1053 // ER_SERVER_SHUTDOWN
	gotSignal           = 1078 // ER_GOT_SIGNAL
	forcingClose        = 1080 // ER_FORCING_CLOSE
	tableFull           = 1114 // ER_RECORD_FILE_FULL
	hostBlocked         = 1129 // ER_HOST_IS_BLOCKED
	noThread            = 1135 // ER_CANT_CREATE_THREAD
	tooManyDelayed      = 1151 // ER_TOO_MANY_DELAYED_THREADS
	abortingConnection  = 1152 // ER_ABORTING_CONNECTION
	packetTooLarge      = 1153 // ER_NET_PACKET_TOO_LARGE
	netReadError        = 1158 // ER_NET_READ_ERROR
	netReadInterrupted  = 1159 // ER_NET_READ_INTERRUPTED
	netWriteError       = 1160 // ER_NET_ERROR_ON_WRITE
	netWriteInterrupted = 1161 // ER_NET_WRITE_INTERRUPTED
	tooManyOfAccount    = 1203 // ER_TOO_MANY_USER_CONNECTIONS
	accountLimit        = 1226 // ER_USER_LIMIT_REACHED
	stackOverrun        = 1436 // ER_STACK_OVERRUN_NEED_MORE
	tooManyPrepared     = 1461 // ER_MAX_PREPARED_STMT_COUNT_REACHED
	connectionKilled    = 1927 // ER_CONNECTION_KILLED of MariaDB
	clientGone          = 2006 // CR_SERVER_GONE_ERROR, of a proxy's own client
	clientLost          = 2013 // CR_SERVER_LOST, of a proxy's own client
	sessionKilled       = 3169 // ER_SESSION_WAS_KILLED
	capacityExceeded    = 3170 // ER_CAPACITY_EXCEEDED
	idleTooLong         = 4031 // ER_CLIENT_INTERACTION_TIMEOUT
)
