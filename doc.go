// Package mysqllock is a database/sql driver that gives ordinary code
// distributed locks in the MySQL or MariaDB it already has.
//
// It wraps github.com/go-sql-driver/mysql. A handle that was opened with
//
//	db, err := sql.Open("mysqllock", dsn)
//
// behaves as one opened with "mysql" until a context carries a lock hint, made
// by [lockctx.With]. Then the same, unchanged code runs under the lock:
//
//	ctx = lockctx.With(ctx, "product:42")
//	tx, err := db.BeginTx(ctx, nil) // BEGIN and the lock, in one round trip
//
// The lock is an InnoDB row lock in the transaction that does the work, so the
// lock and the write commit together; or, by [lockctx.Lease], a lease that
// outlives transactions and connections, and that every transaction checks right
// before its COMMIT. Either way whoever has lost the lock, for whatever reason,
// cannot commit.
//
// # Words
//
// A key is what the caller names. A lock context is the context that With
// returns, and every context derived from it. A unit of work is what runs in a
// lock context from its first statement to its first commit, or to the end of
// the context: one transaction that holds the locks. A session is the dedicated
// connection, one of lockMaxConns, on which a unit of work lives that was not
// begun by BeginTx. A lease is a hold with an expiry, renewed while its owner
// lives.
//
// # The rules of a lock context
//
// With no unit of work open,
//
//   - BeginTx begins the transaction and takes the lock, on the connection that
//     database/sql chose. Commit and Rollback give the lock back.
//   - Exec, and a query that writes, is BEGIN with the lock, the statement,
//     COMMIT, on the connection that database/sql chose.
//   - A query that only reads opens a session: BEGIN with the lock, the query.
//     The lock stays, so that what is written later in the same lock context is
//     decided on data that nobody has changed. If that context can never end,
//     the query fails with [ErrNoEnd].
//   - A statement of an explicit sql.Tx that began without the hint takes the
//     lock in that transaction first.
//
// With a session open,
//
//   - reading queries run on it, and the lock stays;
//   - Exec, and a query that writes, runs on it and is followed by COMMIT, which
//     gives the lock back. If the statement fails, the lock stays;
//   - BeginTx is the session's own transaction, whose Commit or Rollback gives
//     the lock back. Other options than the session's are an error;
//   - statements of an explicit sql.Tx that began without the hint stay on its
//     connection; the lock is the session's, and the Commit of that transaction
//     fails, with [ErrLost] where the session has ended before it. The session is
//     asked, not locked in: it can be lost while that COMMIT is under way. Begin
//     the transaction with the lock context to be sure;
//   - when the context ends, an open transaction is rolled back; without one the
//     session is committed, since only finished autocommit statements are in it.
//
// With a transaction open, statements in its lock context run in it, whether or
// not they go through the sql.Tx. BeginTx is a savepoint: Commit releases it,
// Rollback goes back to it. Transactions of one lock context end in the reverse
// order in which they began; out of order, all of it is rolled back. Parallel
// work gets lock contexts of its own; statements of one lock context take turns.
//
// The same key again joins; another key joins as a second lock. Everywhere,
// [lockctx.Without] is the way out.
//
// What only reads is decided by a look at the statement's text; in doubt it is a
// write. A statement that would end the transaction, as COMMIT as text, DDL and
// LOCK TABLES do, fails with [ErrUnsafe] before it is sent. A procedure that
// turns out to have ended it, or to have gone back to a savepoint that it did not
// set itself, is followed by [ErrLost]; what it committed stays. CALL costs two statements more for that.
//
// Up to 4 MiB of a query's rows are read ahead, so that code which queries inside
// a rows.Next loop works as it does without a lock. What goes beyond is streamed,
// and until it is closed other statements of the unit of work fail. A reader that
// pauses for longer than the TTL in the middle of such rows loses the lock.
//
// # Leases
//
// [lockctx.Lease] is for work that takes longer than a transaction should, or
// that must survive a lost connection, a proxy, a restart of the server. The
// lease is the key's row in the lock table, with its owner, a token and an
// expiry. One goroutine renews all leases of a handle, each every third of its
// TTL, many in one statement.
//
// Under [lockctx.With] the rules are those above, but for what a session is for:
// a lease needs none. A query that only reads takes the lease and runs where
// database/sql sends it; the lease stays. BeginTx, Exec and a query that writes
// end the unit of work with their commit, and the lease is given back after it.
// The end of the context gives it back, too. Within [Do] and [Acquire]
// transactions and statements are what they are without a lock, with as many side
// by side as there are connections.
//
// Each of these transactions has one statement more, right before COMMIT and on
// its own connection: the fence. It sees whether the lease is still ours and has
// not run out, and locks it so that nobody takes it until COMMIT is through; for
// several leases it is one statement. Otherwise the transaction is rolled back
// with ErrLost. A single statement that writes becomes such a transaction; one
// that only calls a function which does is taken for a read, and is not. So a
// process that was paused, cut off or replaced for however long cannot commit
// under a lease that it has lost, whether it looks or not. What is done outside
// of the database can be fenced by the token: see [Token].
//
// Who waits for a lease is woken by its release, within a round trip: the
// connection that took the lease also keeps a named lock (GET_LOCK), on which
// waiters queue in the server, one for each process and key. Where that is lost,
// with its connection for one, they look up to four times a second, and when the
// lease has run out.
//
// Leases and row locks on a key exclude each other: a row lock that finds a live
// lease lets the row go and waits for the lease, and who wants a lease waits for
// the row. In a transaction that is open already a row lock cannot be let go, so
// there the lease is looked for first, and where it comes in between the
// transaction is rolled back with ErrLocked.
//
// Time is the server's where leases are compared (UTC_TIMESTAMP, whatever the
// session's time zone), and the local monotonic clock where a holder counts
// down; the two are never compared. A holder stops, and its context ends, a tenth
// of the TTL, at most five seconds, before the server lets anybody else have the
// lease. A server whose clock is set forward ends leases early, and a machine
// that is suspended may not count the time: the holder does not know, but the
// fence does.
//
// A token grows by one with each grant of its key, and with each commit that sets a
// version where the key is kept optimistically, too. That outlasts release, clean-up
// of the table and a restart of the server, as far as the server does not lose
// commits: innodb_flush_log_at_trx_commit must be 1, its default.
//
// # Advisory locks
//
// [lockctx.Advisory] keeps the lock as a named lock of the server (GET_LOCK). It
// follows the rules of leases: nothing is pinned, and within [Do] and [Acquire]
// transactions are real. It has no table, no token and no expiry; it lasts as long
// as its connection, one of a few that the handle shares among all such locks,
// and that the driver pings. Where that is gone every hold on it is told within a
// second; where the server does not answer, before it would free the locks. A
// lock is never silently taken again.
//
// Right before COMMIT the server is asked, on the transaction's connection,
// whether the lock's connection still has it. Unlike the fence of a lease this
// does not keep the lock from being lost between the question and COMMIT.
//
// Two goroutines exclude each other by their lock contexts, although GET_LOCK
// would let the same connection have a lock twice. Waiters line up in the process,
// first come first served, and the lock goes from one to the next without a
// statement, as often as lockHandOvers and lockHandOverTime say; so it does with
// leases, each with a new token. A process that waits for another takes one
// connection for each key while it does.
//
// Names are the namespace and the key, hashed where that is longer or means more
// than GET_LOCK can tell apart. Advisory locks are a space of their own: they do
// not exclude row locks and leases on the same key. Behind a proxy that sends the
// statements of one connection to several of its own they fail with ErrUnsafe. On
// Galera and Group Replication, also with a single primary, every node grants
// them, so there they are refused.
//
// # Optimistic versions
//
// [lockctx.Optimistic] locks nothing while the caller thinks. The first statement
// of the unit of work is preceded by one plain read, which remembers the key's
// version. Once the unit has written, one statement right before its COMMIT, in
// the same transaction, compares the version and sets the next; where somebody
// else has committed under the key meanwhile, or has its row locked at that
// moment, all is rolled back with [ErrConflict]. It never waits there. Running the
// unit of work again is safe: from lockctx.With, since what was read before must
// not decide once more. In [Do], [lockctx.Retry] does it. A unit that has only read
// is not compared, and sets no version. A SELECT that calls a function which is not
// one of the server's own counts as a write; a view that calls one does not, and
// what a procedure commits by itself is not compared.
//
// It follows the rules of leases: a query that only reads runs where database/sql
// sends it, and needs no context that ends; BeginTx, Exec and a query that writes
// end the unit of work with their commit. Within [Do] and [Acquire] it is as with a
// row lock: all of it is one transaction, which is compared when it commits.
//
// [Version] tells the version, which can go into a form, and come back with the
// next request to [lockctx.IfVersion]: then the commit fails where somebody has
// committed since the form was made.
//
// Row locks and leases on the same key count. A unit of work waits before its
// first statement for whoever has a lease on the key; each grant of a lease is a
// new version; and so is the commit of a row lock that has written, which costs
// that one statement more, right before COMMIT, on keys that have ever been kept
// optimistically. There, statements of a transaction that began without the hint
// cannot run under a session's lock (ErrUnsafe): begin it with the lock context. Nor
// is a version compared within a hold that has a lease on the key, which keeps others
// out but not the transactions in it (ErrUnsafe). A version is the token of the key's
// row.
//
// For a version column in the application's own tables none of this is needed:
// package optimistic has [optimistic.Changed] for that.
//
// # Many holders
//
// [lockctx.Shared] is for many readers or one writer. Requests are granted in the
// order in which they come, within a process and in the server (what MySQL does
// otherwise is in the documentation of package rowlock), so that neither starves.
// A unit of work that holds a key shared and asks for it exclusively is refused
// with [ErrUnsafe], since two of them would wait for each other.
//
// [lockctx.Slots] is a counting semaphore over all processes: each slot is a row
// of the lock table, with a row lock or a lease on it. [Slot] tells which. In one
// process a slot that is given back goes to the first who waits; among processes
// there is no order. Who waits for one waits for any, but in the server for one at a
// time, and looks at the others up to four times a second.
//
// # Claims
//
// [lockctx.ForUpdate], [lockctx.ForShare] and [lockctx.SkipLocked] have the
// caller's own SELECTs lock the rows that they return, in a transaction of the
// caller's: workers who share a table of tasks claim each their own, through an
// ORM that has no word for it. [lockctx.Claim] is for them alone, and they go with
// a key, too. Only a single plain SELECT is changed, by text at its end. What
// reads rows in another way (UNION, WITH, a subquery in FROM, DISTINCT, GROUP BY,
// MATCH, and the like) fails with [ErrUnsafe] and an error that says why, before anything
// is sent; so does a claim outside of a transaction. Statements that write, and
// those of the session (SAVEPOINT, SET), run as they are.
//
// A claim locks what a locking read locks, which can be more than what it returns:
// under REPEATABLE READ also the rows that it looked at and the gaps between them,
// so that workers get in each other's way without need. Under READ COMMITTED, and
// with an index that finds the rows in their order, it is those rows alone.
//
// # When it goes wrong
//
// Every failure is an [*Error] around one of the sentinels. A lock that is not
// granted leaves nothing behind: a caller whose context ends has its statement
// killed on the server, and gets its error within 50 ms where the server
// answers.
//
// A key that is asked for in a transaction that is open already, and not
// granted, leaves that transaction as it was. Of several keys some may have been
// locked by then, so the transaction is rolled back, and its next statements
// fail with [ErrLost]; on Galera so it is with one key for which it has waited.
//
// When a connection is lost, or the server rolls a transaction back to break a
// deadlock, the lock is gone and nothing of the unit of work is committed. The
// statement gets ErrLost or [ErrDeadlock], and what follows gets [ErrLost],
// until the caller has ended the transaction. Where there was none to end, on a
// session, the lock context is spent, since what was decided in it must not be
// written without the lock: start again from lockctx.With. Nothing is ever
// retried silently on another connection once a lock is held.
//
// A lock that is first asked for in a transaction that has read already, at
// REPEATABLE READ or above, fails with [ErrStaleSnapshot]: InnoDB takes the
// snapshot with the first plain read, so data read under the lock would be older
// than the lock.
//
// # Holders that fall silent
//
// A process that dies closes its connections, and its locks are free within
// milliseconds. One whose host vanishes, or that is frozen, does not. Sessions
// have wait_timeout set to lockTTL, and are pinged while their process lives; so
// the lock is free within the TTL, and a holder that comes back gets ErrLost and
// commits nothing. Sessions are what Do, Acquire and reading queries use.
//
// For a transaction on one of database/sql's own connections MariaDB is given
// idle_transaction_timeout with the same effect. MySQL has nothing of the kind
// that would not also end idle connections of the pool, so there the lock of a
// vanished host stays until the server's wait_timeout (8 hours by default) or
// its TCP keep-alive ends it. Where that matters use Do, or set wait_timeout in
// the DSN.
//
// # Connection pools
//
// Who waits for a lock in BeginTx, Query or Exec occupies one of database/sql's
// connections. Where SetMaxOpenConns bounds them, to two or more, and the holder
// of a session needs one for its next statement, the driver finds out and keeps one free:
// callers who would occupy the last fail at once with [ErrLocked] and an error
// that says so. For hot keys use [Do], which waits without a connection.
//
// A readTimeout in the DSN does not limit waits. It has those who wait for a row lock
// ask anew after half of it, and they are then the last of those who wait in the
// server, so it is better a few times as long as locks are held. With [Wrap] it is
// not known: there a longer wait for a row lock fails.
//
// # Seeing what happens
//
// [Config.Observer] is told of each lock that was acquired, refused, released or
// lost; [LogTo] is one that logs, and modules of their own under telemetry are for
// OpenTelemetry and Prometheus. [Stats] counts sessions and those who wait. Package
// inspect, the page of inspect/web and the command cmd/mysqllock show who holds and
// who waits, in all processes.
//
// # The lock table
//
// There is one table with one row a key, and one for each of its further slots. Rows stay:
// never delete one by hand, since its token would begin again. The table is made
// on first use, and one of an older version completed, never inside a
// transaction of the caller's; with lockSchema=manual the error that says it is
// missing carries its DDL. On MySQL a procedure is made too, by which BEGIN and
// the lock go out in one round trip; without the right to make or to execute it
// they go out as two. The account needs SELECT, INSERT and UPDATE on the table,
// for all but advisory locks and claims, which need no privilege on it.
// To be told who holds a key it needs SELECT on performance_schema (MySQL) or
// PROCESS (MariaDB); cancelling needs no privilege.
//
// With lockStripes=N all keys of the namespace share N rows, which are made in
// advance, and the table never grows. Two keys on one row are one lock: rarely,
// those who want different keys wait for each other. In one lock context that does
// no harm, whichever keys it asks for and in whatever order; there one of them as a
// lease makes all of them leases. A token or a version is that of the row, so it grows
// with other keys, too. Shared is exclusive. Each further slot of a key has rows, too,
// which all keys on its row share.
//
// New rows are made while others are locked. Where InnoDB has to split a page for
// them at REPEATABLE READ, it can keep a gap locked on behalf of who holds the row
// beside it, and keys that are new and fall in that gap wait for it, up to 5 seconds
// (seen on MySQL 9.7 with hundreds of new keys while as many were held). Where new
// keys come at all times and locks are held for long, use leases, or lockStripes.
//
// # Clusters and replicas
//
// What the server is, is asked at the first hint, and again after what may be a
// failover: a lost lock, or a server that takes no writes. Then each strategy is
// kept in the form that is safe there, or refused with ErrUnsafe and an error that
// says what to use in place of it. With lockUnsafe=allow all of them are those of
// one server, for an application that sees to it that it uses one node only.
//
//	             one server  Galera            Group Replication,  Group Replication,
//	                                           one primary         several primaries
//	row          safe        safe              safe                refused
//	row, shared  safe        refused           safe                refused
//	lease        safe        safe              safe                safe
//	advisory     safe        refused           refused             refused
//	optimistic   safe        safe              safe                safe
//	claims       safe        refused           safe                refused
//
// On Galera (MariaDB from 10.4 on; not on Percona's) all nodes agree to a row lock
// before it is granted, so it excludes whoever is on another node as well. It costs
// one agreement among the nodes, and a write of the key's row also where nothing
// else is written. Keys that are asked for one after the other can end in a deadlock
// between two nodes, which neither sees: it ends with the wait. Leases and versions
// are kept by writes, which all nodes see, on Galera as in Group Replication. A
// transaction in whose way another node was fails with [ErrDeadlock], or where a
// version is compared also with [ErrConflict]; nothing of it is committed.
//
// A node that dies, stops or is cut off is expelled by the others, after 5 to 7
// seconds on Galera and 22 in Group Replication if nothing else is set. Until then
// the others grant nothing, and then the locks of the row strategy that were held
// on it are free. A lease lasts until its TTL is over, so one of more than these
// times outlives a failover that its holder survives. Whoever held a lock on that
// node and comes back commits nothing, but can go on reading for some seconds. A
// primary of Group Replication that is cut off goes on granting row locks for as
// long as it is: nothing that is written under them is ever committed, but what is
// done outside of the database is not alone. Use a lease for that. Where the node
// itself cannot tell whether the others agreed to a COMMIT the error is [ErrLost]
// with Op "commit", as after a broken connection.
//
// Connections that a balancer spreads over the nodes may read what is older than
// the lock; a row lock is in the connection that reads, and is no older. For leases
// and versions have each read wait for what was written before, by
// wsrep_sync_wait=1 (Galera) or group_replication_consistency='BEFORE' in the DSN,
// or use one node.
//
// A replica, a secondary of Group Replication, and any other server that takes no
// writes (read_only, innodb_read_only) grants locks of which nobody else knows.
// There every strategy fails with ErrUnsafe, lockUnsafe=allow or not, but for
// advisory locks, which it allows. A handle whose endpoint leads to the primary
// again works again. Each statement that locks rows says whether the server takes
// writes, so one that has become a replica grants none. A group that is switched
// to several primaries while it runs is noticed at the next loss of a lock, or of
// its connection: restart the programs.
//
// In Group Replication with several primaries the driver makes the lock table, but
// does not change one of an older version: two members that do so at the same time
// leave the group. With lockStripes on a cluster, let one program start first.
//
// # No interception layer
//
// An early design put github.com/ngrok/sqlmw between database/sql and this
// driver. All state belongs to one connection, so it lives in our own driver.Conn,
// and nothing was left for the layer to do but to take away: the results'
// go-sql-driver interface (mysql.Result), the connector behind DB.Driver, the
// error for an isolation level that a driver does not know. It is not used: what
// the base driver returns for a statement without a hint is returned as it is.
package mysqllock
