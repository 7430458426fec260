package intercept

import (
	"context"
	"database/sql/driver"
	"errors"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"github.com/ngrok/sqlmw"
)

// Log returns an interceptor that writes each statement to l, at level INFO, with the time
// until the server's answer; reading rows is not in it. The lines have the attributes
// statement and took_ms; error if there was one; and step, strategy and keys if the driver has
// added the statement. Arguments are not written. Of a statement that may have a secret in
// its text, such as CREATE USER, only the first word is written.
//
// A statement that go-sql-driver/mysql has to prepare first has a line when it is prepared,
// and one for each time that it runs. Text that has values in it is written with them: let
// the application send values as arguments.
func Log(l *slog.Logger) sqlmw.Interceptor { return logger{to: l} }

// LogArguments is [Log] with the arguments of the statements, which may be personal data, in
// the attribute args. They are left out if the statement has one of these words in it:
// password, passwd, identified, secret, token, credential, encrypt, decrypt.
func LogArguments(l *slog.Logger) sqlmw.Interceptor { return logger{to: l, args: true} }

type logger struct {
	sqlmw.NullInterceptor
	to   *slog.Logger
	args bool
}

var (
	// secretText is in statements whose text may have a secret: those of accounts.
	secretText = regexp.MustCompile(`(?i)identified|passw(or)?d|secret|credential|_(en|de)crypt`)
	// secretArgs is in statements whose arguments may be one.
	secretArgs = regexp.MustCompile(`(?i)identified|passw(or)?d|secret|token|credential|crypt`)
)

// shown is what may be written of a text.
func shown(text string) string {
	if !secretText.MatchString(text) {
		return text
	}
	verb, _, _ := strings.Cut(strings.TrimSpace(text), " ")
	if secretText.MatchString(verb) {
		verb = ""
	}
	return verb + " (not shown: it may have a secret)"
}

// write writes one line. A statement that the base driver wants to prepare has not run.
func (l logger) write(ctx context.Context, what, text string, args []driver.NamedValue, start time.Time, err error) {
	if errors.Is(err, driver.ErrSkip) || !l.to.Enabled(ctx, slog.LevelInfo) {
		return
	}
	attrs := []slog.Attr{slog.Float64("took_ms", float64(time.Since(start).Microseconds())/1000)}
	if text != "" {
		attrs = append(attrs, slog.String("statement", shown(text)))
	}
	if l.args && len(args) > 0 && !secretArgs.MatchString(text) {
		values := make([]any, len(args))
		for i, a := range args {
			values[i] = a.Value
			if b, ok := a.Value.([]byte); ok {
				values[i] = string(b)
			}
		}
		attrs = append(attrs, slog.Any("args", values))
	}
	if lock, ok := Of(ctx); ok {
		attrs = append(attrs, slog.String("step", string(lock.Step)))
		if lock.Strategy != "" {
			attrs = append(attrs, slog.String("strategy", lock.Strategy))
		}
		if len(lock.Keys) > 0 {
			attrs = append(attrs, slog.Any("keys", lock.Keys))
		}
	}
	if err != nil {
		why := err.Error()
		if secretText.MatchString(text) { // a syntax error cites the statement
			why = "not shown"
		}
		attrs = append(attrs, slog.String("error", why))
	}
	l.to.LogAttrs(ctx, slog.LevelInfo, what, attrs...)
}

func (l logger) ConnectorConnect(ctx context.Context, k driver.Connector) (driver.Conn, error) {
	start := time.Now()
	conn, err := k.Connect(ctx)
	l.write(ctx, "connect", "", nil, start, err)
	return conn, err
}

func (l logger) ConnPing(ctx context.Context, conn driver.Pinger) error {
	start := time.Now()
	err := conn.Ping(ctx)
	l.write(ctx, "ping", "", nil, start, err)
	return err
}

func (l logger) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	start := time.Now()
	tx, err := conn.BeginTx(ctx, opts)
	l.write(ctx, "begin", "", nil, start, err)
	return ctx, tx, err
}

func (l logger) TxCommit(ctx context.Context, tx driver.Tx) error {
	start := time.Now()
	err := tx.Commit()
	l.write(ctx, "commit", "", nil, start, err)
	return err
}

func (l logger) TxRollback(ctx context.Context, tx driver.Tx) error {
	start := time.Now()
	err := tx.Rollback()
	l.write(ctx, "rollback", "", nil, start, err)
	return err
}

func (l logger) ConnExecContext(
	ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue,
) (driver.Result, error) {
	start := time.Now()
	res, err := conn.ExecContext(ctx, text, args)
	l.write(ctx, "exec", text, args, start, err)
	return res, err
}

func (l logger) ConnQueryContext(
	ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	start := time.Now()
	rows, err := conn.QueryContext(ctx, text, args)
	l.write(ctx, "query", text, args, start, err)
	return ctx, rows, err
}

func (l logger) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	start := time.Now()
	stmt, err := conn.PrepareContext(ctx, text)
	l.write(ctx, "prepare", text, nil, start, err)
	return ctx, stmt, err
}

func (l logger) StmtExecContext(
	ctx context.Context, stmt driver.StmtExecContext, text string, args []driver.NamedValue,
) (driver.Result, error) {
	start := time.Now()
	res, err := stmt.ExecContext(ctx, args)
	l.write(ctx, "exec", text, args, start, err)
	return res, err
}

func (l logger) StmtQueryContext(
	ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	start := time.Now()
	rows, err := stmt.QueryContext(ctx, args)
	l.write(ctx, "query", text, args, start, err)
	return ctx, rows, err
}
