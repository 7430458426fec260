package lockotel

import (
	"context"
	"database/sql/driver"
	"errors"
	"regexp"
	"strconv"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/telemetry/internal/reason"
)

// Statements returns an interceptor that makes a span of each statement: see the package's
// documentation. It is for the Config of which the Observer is o:
//
//	mysqllock.Config{Observer: locks, Base: intercept.With(locks.Statements())}
//
// Call it before the handle is opened. From then on the spans of locks begin when they
// begin, so that those of their statements can lie beneath them.
func (o *Observer) Statements() sqlmw.Interceptor {
	o.nested.Store(true)
	return statements{o: o}
}

// statements makes the spans. They are made when they have ended: nothing lies beneath them.
type statements struct {
	sqlmw.NullInterceptor
	o *Observer
}

// parents are the spans beneath which a statement's span lies, its parent first; none if it has no
// span.
func parents(ctx context.Context, l intercept.Lock) (out []trace.SpanContext) {
	for _, asked := range l.Contexts {
		if r, ok := asked.Value(recordKey{}).(*record); ok {
			out = append(out, r.current())
		}
	}
	if span := trace.SpanContextFromContext(ctx); len(out) == 0 && span.IsValid() {
		out = append(out, span)
	}
	return out
}

// span makes the span of a statement that has been answered. text is "" if it has none.
func (s statements) span(ctx context.Context, name, text string, start time.Time, err error) {
	if errors.Is(err, driver.ErrSkip) { // it has not been sent: it is prepared next
		return
	}
	lock, ours := intercept.Of(ctx)
	if !ours && s.o.options.LockStatementsOnly {
		return
	}
	above := parents(ctx, lock)
	if len(above) == 0 {
		return
	}
	end := time.Now()
	options := []trace.SpanStartOption{
		trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(start), trace.WithAttributes(s.o.attributes...),
	}
	switch {
	case name != "":
	case ours:
		name = verb(text)
	default:
		name = sqltext.Verb(text)
	}
	if name != "" {
		options = append(options, trace.WithAttributes(semconv.DBOperationName(name)))
	} else {
		name = "SQL"
	}
	for _, other := range above[1:] {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: other}))
	}
	_, span := s.o.tracer.Start(trace.ContextWithSpanContext(ctx, above[0]), name, options...)
	defer span.End(trace.WithTimestamp(end))
	if !span.IsRecording() {
		return
	}
	if text != "" {
		span.SetAttributes(semconv.DBQueryText(sanitized(text)))
	}
	if ours {
		span.SetAttributes(attribute.String("mysqllock.step", string(lock.Step)))
	}
	if lock.Strategy != "" {
		span.SetAttributes(attribute.String("mysqllock.strategy", lock.Strategy))
	}
	if len(lock.Keys) > 0 {
		span.SetAttributes(attribute.StringSlice("mysqllock.keys", s.o.keys(lock.Keys)))
	}
	if err != nil {
		s.failed(span, err, lock.Step)
	}
}

// commits finds a COMMIT among the statements of a text.
var commits = regexp.MustCompile(`(^|; )COMMIT(;|$)`)

// verb names a text of the driver's own, of one statement or of several: COMMIT if one of these commits, else by the
// first.
func verb(text string) string {
	if commits.MatchString(text) {
		return "COMMIT"
	}
	return sqltext.Verb(text)
}

// The errors of a statement that finds a lock held.
const (
	lockWaitTimeout = 1205 // ER_LOCK_WAIT_TIMEOUT, also of NOWAIT on MariaDB
	lockedNowait    = 3572 // ER_LOCK_NOWAIT
)

// failed says why a statement failed, without the server's words: they cite the statement.
// That a lock is held is an answer of the server like any other.
func (s statements) failed(span trace.Span, err error, of intercept.Step) {
	why, held := reason.Of(err), false
	if said := (*mysql.MySQLError)(nil); errors.As(err, &said) {
		why = strconv.Itoa(int(said.Number))
		span.SetAttributes(semconv.DBResponseStatusCode(why))
		held = of == intercept.Take && (said.Number == lockedNowait || said.Number == lockWaitTimeout)
	}
	span.SetAttributes(semconv.ErrorTypeKey.String(why))
	if !held {
		span.SetStatus(codes.Error, why)
	}
}

func (s statements) ConnectorConnect(ctx context.Context, k driver.Connector) (driver.Conn, error) {
	start := time.Now()
	conn, err := k.Connect(ctx)
	s.span(ctx, "connect", "", start, err)
	return conn, err
}

func (s statements) ConnPing(ctx context.Context, conn driver.Pinger) error {
	start := time.Now()
	err := conn.Ping(ctx)
	s.span(ctx, "ping", "", start, err)
	return err
}

func (s statements) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	start := time.Now()
	tx, err := conn.BeginTx(ctx, opts)
	s.span(ctx, "BEGIN", "", start, err)
	return ctx, tx, err
}

func (s statements) TxCommit(ctx context.Context, tx driver.Tx) error {
	start := time.Now()
	err := tx.Commit()
	s.span(ctx, "COMMIT", "", start, err)
	return err
}

func (s statements) TxRollback(ctx context.Context, tx driver.Tx) error {
	start := time.Now()
	err := tx.Rollback()
	s.span(ctx, "ROLLBACK", "", start, err)
	return err
}

func (s statements) ConnExecContext(
	ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue,
) (driver.Result, error) {
	start := time.Now()
	res, err := conn.ExecContext(ctx, text, args)
	s.span(ctx, "", text, start, err)
	return res, err
}

func (s statements) ConnQueryContext(
	ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	start := time.Now()
	rows, err := conn.QueryContext(ctx, text, args)
	s.span(ctx, "", text, start, err)
	return ctx, rows, err
}

func (s statements) ConnPrepareContext(
	ctx context.Context, conn driver.ConnPrepareContext, text string,
) (context.Context, driver.Stmt, error) {
	start := time.Now()
	stmt, err := conn.PrepareContext(ctx, text)
	s.span(ctx, "PREPARE", text, start, err)
	return ctx, stmt, err
}

func (s statements) StmtExecContext(
	ctx context.Context, stmt driver.StmtExecContext, text string, args []driver.NamedValue,
) (driver.Result, error) {
	start := time.Now()
	res, err := stmt.ExecContext(ctx, args)
	s.span(ctx, "", text, start, err)
	return res, err
}

func (s statements) StmtQueryContext(
	ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	start := time.Now()
	rows, err := stmt.QueryContext(ctx, args)
	s.span(ctx, "", text, start, err)
	return ctx, rows, err
}
