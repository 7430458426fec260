// Package intercept shows all statements that go to the server to interceptors of
// [github.com/ngrok/sqlmw]: those of the application, and those that the driver adds for
// locks, which nothing above the driver can see. It is for logs, traces, audits, and for
// faults in tests.
//
//	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{
//		Base: intercept.With(audit{}),
//	})
//	db := sql.OpenDB(connector)
//
// [Log] is ready to use; telemetry/otel has spans. Another interceptor embeds
// [sqlmw.NullInterceptor] and has the methods that it needs. [Of] tells lock statements from
// those of the application, by the context that the method gets:
//
//	func (audit) ConnExecContext(
//		ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue,
//	) (driver.Result, error) {
//		if lock, ok := intercept.Of(ctx); ok {
//			log.Println(lock.Step, lock.Strategy, lock.Keys, text) // take row [order:42] SELECT …
//		}
//		return conn.ExecContext(ctx, text, args)
//	}
//
// A statement in the background, such as a renewal, has not the context of the caller that
// asked for the lock. A [mysqllock.Tracer] gives each lock a context of its own, and
// [Lock].Contexts has it for all statements of the lock.
//
// # What an interceptor must keep to
//
// The driver decides by what comes back. Return the base's errors as they are, or so that
// errors.Is and errors.As find them: an error without the server's number is taken for a
// broken connection, and a lost answer. Do not swallow an error, and do not answer a lock
// statement yourself. Do not block: a renewal that comes too late loses the lease. Do not
// use the handle from within: its connection is in use.
//
// # What sqlmw would lose, and does not here
//
// A base that has no ExecContext does not make it panic, and it claims no more than the base
// has. What a driver without ConnBeginTx cannot do is an error. Arguments are converted as
// the base says. Connectors are closed, and have the base's Driver. Results of
// go-sql-driver/mysql are still [mysql.Result]. The connection has Unwrap, down to the
// base's. At the end of a transaction, and of a prepared statement, the context is not over.
// Calls without a context are shown, too.
//
// # What it costs
//
// An interceptor that does nothing costs 0.1 µs and two allocations for each statement, and
// 5 ns for each row: on a base that answers at once the ratio of the medians is 1.1 to 1.4
// (BenchmarkEmptyInterceptor of the driver). In a locked transaction on a server it cannot
// be told from noise: the ratio is 0.98 to 1.03 (BenchmarkLockedTransaction). Without
// [mysqllock.Config.Base] nothing is in between, and nothing is allocated.
//
// # What remains
//
// On a driver without a server the tests compare all that an application sees with and
// without an interceptor that does nothing: there is no difference. These are outside of that:
//
//   - The results and rows that come back are sqlmw's: a type assertion to a type of the
//     base driver fails, one to an interface does not.
//   - go-sql-driver/mysql answers a statement with arguments by [driver.ErrSkip], unless
//     interpolateParams is set. An interceptor sees that as an error of ConnExecContext or
//     ConnQueryContext. Then the statement is prepared, run and closed.
//   - Nothing is shown of Close and ResetSession of a connection, of IsValid, of
//     NextResultSet, and of dialling; ResultLastInsertId and ResultRowsAffected get no
//     context.
//   - The context of a COMMIT or ROLLBACK by [driver.Tx] is that of its BEGIN, without its
//     end.
//   - In a process in which one handle has interceptors, each lock statement of all handles
//     costs one allocation more.
package intercept
