package intercept

import (
	"context"
	"database/sql/driver"
	"io"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock/internal/purpose"
)

// connector opens connections that sqlmw wraps. sqlmw's own connector would lose Close and
// Driver of the base.
type connector struct {
	driver.Connector
	by calm
}

// closing is a connector whose base has to be closed.
type closing struct {
	connector
	io.Closer
}

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	base, err := c.by.ConnectorConnect(ctx, c.Connector)
	if err != nil {
		return nil, err
	}
	below := &below{Conn: base}
	shown, err := sqlmw.Driver(open{below}, c.by).Open("")
	if err != nil {
		return nil, err
	}
	return (&conn{shown: shown.(wrapped), below: below}).shaped(), nil
}

// open is a driver that has one connection: sqlmw wraps drivers.
type open struct{ conn driver.Conn }

func (o open) Open(string) (driver.Conn, error) { return o.conn, nil }

// calm calls an interceptor with contexts that are not over. sqlmw calls it for the end of
// a transaction, or of a statement, with the context of its beginning, which may have ended
// long ago: that may be the very reason for a rollback.
type calm struct{ sqlmw.Interceptor }

func (c calm) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	ctx, tx, err := c.Interceptor.ConnBeginTx(ctx, conn, opts)
	return lasting(ctx), tx, err
}

func (c calm) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	ctx, stmt, err := c.Interceptor.ConnPrepareContext(ctx, conn, text)
	return lasting(ctx), stmt, err
}

func (c calm) TxCommit(ctx context.Context, tx driver.Tx) error {
	return c.Interceptor.TxCommit(ending(ctx), tx)
}

func (c calm) TxRollback(ctx context.Context, tx driver.Tx) error {
	return c.Interceptor.TxRollback(ending(ctx), tx)
}

func lasting(ctx context.Context) context.Context {
	if ctx == nil { // from an interceptor that returns none with an error
		ctx = context.Background()
	}
	return context.WithoutCancel(ctx)
}

// ending is the context for the end of a transaction that was begun with ctx: where a lock
// statement has begun it, its end is a step of the lock, too.
func ending(ctx context.Context) context.Context {
	if _, ok := purpose.From(ctx); ok {
		return purpose.For(ctx, purpose.End)
	}
	return ctx
}
