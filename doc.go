// Package mysqllock is a database/sql driver that gives ordinary code distributed
// locks in the MySQL or MariaDB it already has. It wraps
// github.com/go-sql-driver/mysql. A handle that was opened with
//
//	db, err := sql.Open("mysqllock", dsn)
//
// behaves as one opened with "mysql" until a statement runs with a lock context, made by
// [lockctx.With]. Then the same, unchanged code runs under the lock. A holder that
// has lost the lock, for whatever reason, cannot commit. An advisory lock is the
// exception: see below.
//
// # A transaction
//
// BeginTx takes the lock, Commit and Rollback give it back. BEGIN and the lock go out
// in one round trip:
//
//	ctx = lockctx.With(ctx, "product:42")
//	tx, err := db.BeginTx(ctx, nil) // takes the lock
//
// # A function
//
// [Do] runs a function under the lock, and [Acquire] takes the lock until its Release.
// Both wait without occupying a connection of database/sql:
//
//	err := mysqllock.Do(ctx, db, "nightly-report", func(ctx context.Context) error {
//		_, err := db.ExecContext(ctx, "INSERT INTO reports (day) VALUES (CURRENT_DATE)")
//		return err
//	}, lockctx.NoWait())
//
// # Read, decide, write
//
// Without a transaction a read takes the lock, and the first commit that may have
// changed something gives it back. A second write, without a new read, fails with
// [ErrStaleRead] before it is sent, and what was committed before stays. So this is for one
// write; for more use Do or a transaction. First make a context that ends, then pass it to With:
// if no write has given the lock back, the end of the context does.
//
//	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
//	defer cancel()
//	ctx = lockctx.With(ctx, "product:42")
//	var stock int
//	if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil { // takes the lock
//		return err
//	}
//	_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = 42", stock-1) // commits, and gives the lock back
//
// # Work that takes long
//
// A lease outlives transactions and connections. The driver renews it while the holder
// lives, and checks it right before each COMMIT under it:
//
//	err := mysqllock.Do(ctx, db, "restock", func(ctx context.Context) error {
//		token, _ := mysqllock.Token(ctx) // for systems outside of the database
//		return order(ctx, token)         // may take minutes
//	}, lockctx.Lease(30*time.Second))
//
// # Strategies
//
//	option                        the lock is                        use it for
//	lockctx.Row (the default)     a row lock in the transaction      short transactions
//	lockctx.Lease                 a row with an expiry, and a token  long work, lost connections
//	lockctx.Advisory              a named lock (GET_LOCK)            many cheap locks
//	lockctx.Optimistic            none: the commit compares          rare conflicts, forms
//	lockctx.Shared                a shared row lock                  many readers, one writer
//	lockctx.Slots                 up to n row locks or leases        a semaphore
//
// Row locks and leases on the same key exclude each other, and an optimistic commit
// notices both. Advisory locks exclude only advisory locks. An advisory lock is checked
// right before COMMIT, but can be lost between the check and COMMIT. On a cluster some
// strategies are refused with [ErrUnsafe].
//
// # Errors
//
// Every failure of a lock is an [*Error] around one of the sentinels. Test for them
// with errors.Is.
//
//   - [ErrLocked], [ErrTimeout]: the lock was not granted, mostly because another holder
//     has the key, which the error names if the server lets the account see it. Nothing
//     was run.
//   - [ErrDeadlock], [ErrConflict]: run the unit of work again, from lockctx.With.
//   - [ErrLost]: the lock is gone, and nothing of the unit of work is committed. If Op
//     is "commit" the outcome can be unknown. Nothing was retried on another connection.
//   - [ErrUnsafe], [ErrNoEnd], [ErrStaleRead], [ErrStaleSnapshot]: the lock
//     cannot protect this code. The error says what to do instead.
//   - [ErrExhausted]: no connection to ask on; the error names the bound, such as
//     [Config.MaxConns] or [Config.LockMaxConns].
//   - [ErrNoAnswer]: the server has not answered.
//   - [ErrClosed]: the handle, or the hold, is closed.
//
// # More
//
//   - [Guide]: GORM, sqlx, bun; jobs, leases, leaders, forms, workers.
//   - [How you can get no lock], without an error.
//   - [In production]: grants, TTLs, time-outs, monitoring.
//   - [Lock contexts]: what happens to each kind of statement; reads and later
//     writes; savepoints; session variables and sql.Conn.
//   - [Strategies]: how each strategy keeps a lock, and what it costs.
//   - [Errors]: lost locks, old snapshots, holders that fall silent, connection pools,
//     deadlocks.
//   - [Servers]: which programs share a lock, the lock table, clusters, replicas, proxies.
//   - [Security]: privileges, TLS, names, secrets.
//   - [Architecture]: for those who change the driver.
//
// [Guide]: https://github.com/mysqllock/mysqllock/blob/main/docs/guide.md
// [How you can get no lock]: https://github.com/mysqllock/mysqllock/blob/main/docs/no-lock.md
// [In production]: https://github.com/mysqllock/mysqllock/blob/main/docs/production.md
// [Lock contexts]: https://github.com/mysqllock/mysqllock/blob/main/docs/lock-contexts.md
// [Strategies]: https://github.com/mysqllock/mysqllock/blob/main/docs/strategies.md
// [Errors]: https://github.com/mysqllock/mysqllock/blob/main/docs/errors.md
// [Servers]: https://github.com/mysqllock/mysqllock/blob/main/docs/servers.md
// [Security]: https://github.com/mysqllock/mysqllock/blob/main/docs/security.md
// [Architecture]: https://github.com/mysqllock/mysqllock/blob/main/docs/architecture.md
package mysqllock
