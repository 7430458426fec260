package mysqllock_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
)

// fakeServer is a database in memory. It writes down every call that arrives
// at it. Its connections, statements and rows have the optional interfaces
// that their shape says.
//
// What a statement gets is in its own text, unless answer is set: "slow" takes
// a second, "skip" is answered with driver.ErrSkip on a connection, "bad once"
// and "bad always" with driver.ErrBadConn, "fail" with errFake; "prepare fails",
// "rows fail" and "rows bad" speak for themselves.
type fakeServer struct {
	conn   func(*fakeConn) driver.Conn
	stmt   func(*fakeStmt) driver.Stmt
	rows   func(*fakeRows) driver.Rows
	answer func(c *fakeConn, text string) (fakeReply, error)

	begins   string // "slow" where a transaction takes a second to begin
	anyInput bool   // statements do not know how many arguments they take
	reset    error  // what ResetSession answers
	invalid  bool   // what IsValid answers, negated
	txErr    error  // what Commit and Rollback answer
	closeErr error  // what closing anything answers

	mu     sync.Mutex
	log    []string
	opened int
	bad    map[string]bool
}

var (
	errFake      = errors.New("the fake server says no")
	errFakeClose = errors.New("the fake server does not close")
)

// fakeReply is what a statement returns.
type fakeReply struct {
	columns []string
	rows    [][]driver.Value
	more    [][]driver.Value // a second result set
}

func (fs *fakeServer) write(format string, args ...any) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.log = append(fs.log, fmt.Sprintf(format, args...))
}

// since returns what has been written down, and forgets it.
func (fs *fakeServer) since() []string {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	log := fs.log
	fs.log = nil
	return log
}

// sent is since without what is no traffic between client and server.
func (fs *fakeServer) sent() []string {
	return slices.DeleteFunc(fs.since(), func(line string) bool {
		for _, local := range []string{" connect", " close", " ResetSession", " IsValid", " CheckNamedValue ", " ColumnConverter ", " Rows.Close "} {
			if strings.Contains(line, local) {
				return true
			}
		}
		return false
	})
}

// fakeConnector connects to a fakeServer.
type fakeConnector struct{ s *fakeServer }

func (fc fakeConnector) Connect(ctx context.Context) (driver.Conn, error) {
	s := fc.s
	s.mu.Lock()
	s.opened++
	c := &fakeConn{s: s, id: s.opened}
	s.mu.Unlock()
	s.write("%d connect%s", c.id, mark(ctx))
	return s.conn(c), nil
}

func (fc fakeConnector) Driver() driver.Driver { return fakeDriver{} }

type fakeDriver struct{}

func (fakeDriver) Open(string) (driver.Conn, error) { return nil, errFake }

// fakeCloser is a connector that wants to be closed.
type fakeCloser struct{ fakeConnector }

func (fc fakeCloser) Close() error {
	fc.s.write("connector close")
	return fc.s.closeErr
}

// fakeMark is carried by the contexts of callers, so that the log shows which
// of them arrived.
type fakeMark struct{}

func marked(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, fakeMark{}, name)
}

func mark(ctx context.Context) string {
	name, _ := ctx.Value(fakeMark{}).(string)
	if name != "" {
		name = " <" + name + ">"
	}
	if ctx.Err() != nil {
		name += " (" + ctx.Err().Error() + ")"
	}
	return name
}

// fakeConn is a connection without optional interfaces; they are added by
// embedding what follows beside it.
type fakeConn struct {
	s  *fakeServer
	id int
}

func (fc *fakeConn) Prepare(text string) (driver.Stmt, error) {
	return fc.prepare(context.Background(), "Prepare", text)
}

func (fc *fakeConn) Begin() (driver.Tx, error) {
	fc.s.write("%d Begin", fc.id)
	return fakeTx{fc}, fc.slow(context.Background(), fc.s.begins)
}

func (fc *fakeConn) Close() error {
	fc.s.write("%d close", fc.id)
	return fc.s.closeErr
}

func (fc *fakeConn) prepare(ctx context.Context, how, text string) (driver.Stmt, error) {
	fc.s.write("%d %s %s%s", fc.id, how, text, mark(ctx))
	if strings.Contains(text, "prepare fails") {
		return nil, errFake
	}
	if err := fc.slow(ctx, text); err != nil {
		return nil, err
	}
	return fc.s.stmt(&fakeStmt{c: fc, text: text}), nil
}

func (fc *fakeConn) slow(ctx context.Context, text string) error {
	if !strings.Contains(text, "slow") {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Second):
		return nil
	}
}

// run answers a statement that came by the method how.
func (fc *fakeConn) run(ctx context.Context, how, text string, args any) (fakeReply, error) {
	fc.s.write("%d %s %s %v%s", fc.id, how, text, args, mark(ctx))
	if fc.s.answer != nil {
		return fc.s.answer(fc, text)
	}
	switch {
	case strings.Contains(text, "skip") && !strings.HasPrefix(how, "Stmt"):
		return fakeReply{}, driver.ErrSkip
	case strings.Contains(text, "bad always"), strings.Contains(text, "bad once") && fc.s.first(text):
		return fakeReply{}, driver.ErrBadConn
	case strings.Contains(text, "fail") && !strings.Contains(text, "rows fail"):
		return fakeReply{}, errFake
	}
	return fakeTable(), fc.slow(ctx, text)
}

func (fs *fakeServer) first(text string) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.bad == nil {
		fs.bad = make(map[string]bool)
	}
	seen := fs.bad[text]
	fs.bad[text] = true
	return !seen
}

func fakeTable() fakeReply {
	return fakeReply{
		columns: []string{"id", "name"},
		rows:    [][]driver.Value{{int64(1), []byte("one")}, {int64(2), nil}, {int64(3), []byte("three")}},
		more:    [][]driver.Value{{3.5, "x"}},
	}
}

func (fc *fakeConn) exec(ctx context.Context, how, text string, args any) (driver.Result, error) {
	if _, err := fc.run(ctx, how, text, args); err != nil {
		return nil, err
	}
	return fakeResult{5, 2}, nil
}

func (fc *fakeConn) query(ctx context.Context, how, text string, args any) (driver.Rows, error) {
	reply, err := fc.run(ctx, how, text, args)
	if err != nil {
		return nil, err
	}
	return fc.s.rows(&fakeRows{c: fc, text: text, reply: reply}), nil
}

// fakeResult has methods that driver.Result does not know, those of
// mysql.Result.
type fakeResult struct{ id, n int64 }

func (fr fakeResult) LastInsertId() (int64, error) { return fr.id, nil }
func (fr fakeResult) RowsAffected() (int64, error) { return fr.n, nil }
func (fr fakeResult) AllLastInsertIds() []int64    { return []int64{fr.id, fr.id + 1} }
func (fr fakeResult) AllRowsAffected() []int64     { return []int64{fr.n, fr.n + 1} }

type fakeTx struct{ c *fakeConn }

func (ft fakeTx) Commit() error {
	ft.c.s.write("%d Commit", ft.c.id)
	return ft.c.s.txErr
}

func (ft fakeTx) Rollback() error {
	ft.c.s.write("%d Rollback", ft.c.id)
	return ft.c.s.txErr
}

// fakePoint is an argument that only the fake driver's own checkers know;
// fakeGone is one that they remove, fakeRefused one that they refuse.
type (
	fakePoint   struct{ x, y int }
	fakeGone    struct{}
	fakeRefused struct{}
)

func (fs *fakeServer) check(where string, v *driver.NamedValue) error {
	fs.write("%s CheckNamedValue %v", where, *v)
	switch value := v.Value.(type) {
	case fakePoint:
		v.Value = fmt.Sprintf("POINT(%d %d)", value.x, value.y)
		return nil
	case fakeGone:
		return driver.ErrRemoveArgument
	case fakeRefused:
		return errFake
	}
	return driver.ErrSkip
}

// The optional interfaces of a connection.
type (
	connBeginTx   struct{ c *fakeConn }
	connPrepare   struct{ c *fakeConn }
	connExec      struct{ c *fakeConn }
	connExecCtx   struct{ c *fakeConn }
	connQuery     struct{ c *fakeConn }
	connQueryCtx  struct{ c *fakeConn }
	connChecker   struct{ c *fakeConn }
	connPinger    struct{ c *fakeConn }
	connResetter  struct{ c *fakeConn }
	connValidator struct{ c *fakeConn }
)

func (c connBeginTx) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	c.c.s.write("%d BeginTx %+v%s", c.c.id, opts, mark(ctx))
	if err := c.c.slow(ctx, c.c.s.begins); err != nil {
		return nil, err
	}
	return fakeTx(c), nil
}

func (c connPrepare) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	return c.c.prepare(ctx, "PrepareContext", text)
}

func (c connExec) Exec(text string, args []driver.Value) (driver.Result, error) {
	return c.c.exec(context.Background(), "Exec", text, args)
}

func (c connExecCtx) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	return c.c.exec(ctx, "ExecContext", text, args)
}

func (c connQuery) Query(text string, args []driver.Value) (driver.Rows, error) {
	return c.c.query(context.Background(), "Query", text, args)
}

func (c connQueryCtx) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return c.c.query(ctx, "QueryContext", text, args)
}

func (c connChecker) CheckNamedValue(v *driver.NamedValue) error { return c.c.s.check("conn", v) }

func (c connPinger) Ping(ctx context.Context) error {
	c.c.s.write("%d Ping%s", c.c.id, mark(ctx))
	return c.c.s.reset
}

func (c connResetter) ResetSession(ctx context.Context) error {
	c.c.s.write("%d ResetSession%s", c.c.id, mark(ctx))
	return c.c.s.reset
}

func (c connValidator) IsValid() bool {
	c.c.s.write("%d IsValid", c.c.id)
	return !c.c.s.invalid
}

// fakeStmt is a prepared statement without optional interfaces.
type fakeStmt struct {
	c    *fakeConn
	text string
}

func (fs *fakeStmt) Close() error {
	fs.c.s.write("%d Stmt.Close %s", fs.c.id, fs.text)
	return fs.c.s.closeErr
}

func (fs *fakeStmt) NumInput() int {
	if fs.c.s.anyInput {
		return -1
	}
	return strings.Count(fs.text, "?")
}

func (fs *fakeStmt) Exec(args []driver.Value) (driver.Result, error) {
	return fs.c.exec(context.Background(), "Stmt.Exec", fs.text, args)
}

func (fs *fakeStmt) Query(args []driver.Value) (driver.Rows, error) {
	return fs.c.query(context.Background(), "Stmt.Query", fs.text, args)
}

// The optional interfaces of a statement.
type (
	stmtExecCtx   struct{ t *fakeStmt }
	stmtQueryCtx  struct{ t *fakeStmt }
	stmtChecker   struct{ t *fakeStmt }
	stmtConverter struct{ t *fakeStmt }
)

func (s stmtExecCtx) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.t.c.exec(ctx, "Stmt.ExecContext", s.t.text, args)
}

func (s stmtQueryCtx) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.t.c.query(ctx, "Stmt.QueryContext", s.t.text, args)
}

func (s stmtChecker) CheckNamedValue(v *driver.NamedValue) error { return s.t.c.s.check("stmt", v) }

func (s stmtConverter) ColumnConverter(i int) driver.ValueConverter {
	s.t.c.s.write("stmt ColumnConverter %d", i)
	return fakeConverter{}
}

type fakeConverter struct{}

func (fakeConverter) ConvertValue(v any) (driver.Value, error) {
	if p, ok := v.(fakePoint); ok {
		return fmt.Sprintf("%d,%d", p.x, p.y), nil
	}
	return driver.DefaultParameterConverter.ConvertValue(v)
}

// fakeRows are rows without optional interfaces. Like those of
// go-sql-driver/mysql they reuse their buffers.
type fakeRows struct {
	c      *fakeConn
	text   string
	reply  fakeReply
	next   int
	buffer [16]byte
}

func (fr *fakeRows) Columns() []string { return fr.reply.columns }

func (fr *fakeRows) Close() error {
	fr.c.s.write("%d Rows.Close %s", fr.c.id, fr.text)
	return fr.c.s.closeErr
}

func (fr *fakeRows) Next(dest []driver.Value) error {
	switch {
	case fr.next == 1 && strings.Contains(fr.text, "rows fail"):
		return errFake
	case fr.next == 1 && strings.Contains(fr.text, "rows bad"):
		return driver.ErrBadConn
	case fr.next == len(fr.reply.rows):
		return io.EOF
	}
	for i, v := range fr.reply.rows[fr.next] {
		if b, ok := v.([]byte); ok {
			v = fr.buffer[:copy(fr.buffer[:], b)]
		}
		dest[i] = v
	}
	fr.next++
	return nil
}

// The optional interfaces of rows.
type (
	rowsSets      struct{ r *fakeRows }
	rowsTypeName  struct{ r *fakeRows }
	rowsScanType  struct{ r *fakeRows }
	rowsLength    struct{ r *fakeRows }
	rowsNullable  struct{ r *fakeRows }
	rowsPrecision struct{ r *fakeRows }
)

func (r rowsSets) HasNextResultSet() bool { return r.r.reply.more != nil }

func (r rowsSets) NextResultSet() error {
	if r.r.reply.more == nil {
		return io.EOF
	}
	r.r.reply = fakeReply{columns: []string{"f", "s"}, rows: r.r.reply.more}
	r.r.next = 0
	return nil
}

func (r rowsTypeName) ColumnTypeDatabaseTypeName(i int) string {
	return strings.ToUpper(r.r.reply.columns[i])
}

func (r rowsScanType) ColumnTypeScanType(i int) reflect.Type {
	return []reflect.Type{reflect.TypeFor[int64](), reflect.TypeFor[[]byte]()}[i]
}

func (r rowsLength) ColumnTypeLength(i int) (int64, bool)   { return 10 * int64(i), i > 0 }
func (r rowsNullable) ColumnTypeNullable(i int) (_, _ bool) { return i > 0, true }

func (r rowsPrecision) ColumnTypePrecisionScale(i int) (_, _ int64, _ bool) {
	return 30 + int64(i), 2, i == 0
}

// connShape, stmtShape and rowsShape are sets of optional interfaces. The
// names say which; what a name leaves out, the shape has not.
type connShape struct {
	name string
	make func(*fakeConn) driver.Conn
}

// connShapes has every way to run a statement directly, with and without a
// checker; every pair of the others; and every triple of BeginTx, ResetSession
// and IsValid, which decide together what happens after a cancelled
// transaction. The last is that of go-sql-driver/mysql.
var connShapes = []connShape{
	{"nothing", func(c *fakeConn) driver.Conn { return c }},
	{"Exec", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connExec
			connBeginTx
			connPinger
			connResetter
		}{c, connExec{c}, connBeginTx{c}, connPinger{c}, connResetter{c}}
	}},
	{"ExecContext", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connExecCtx
			connPrepare
			connBeginTx
			connValidator
		}{c, connExecCtx{c}, connPrepare{c}, connBeginTx{c}, connValidator{c}}
	}},
	{"Query", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connQuery
			connPrepare
			connPinger
			connResetter
			connValidator
		}{c, connQuery{c}, connPrepare{c}, connPinger{c}, connResetter{c}, connValidator{c}}
	}},
	{"Exec Query", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connExec
			connQuery
			connPrepare
			connResetter
		}{c, connExec{c}, connQuery{c}, connPrepare{c}, connResetter{c}}
	}},
	{"ExecContext Query", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connExecCtx
			connQuery
			connBeginTx
			connPinger
		}{c, connExecCtx{c}, connQuery{c}, connBeginTx{c}, connPinger{c}}
	}},
	{"QueryContext", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connQueryCtx
			connBeginTx
			connResetter
			connValidator
		}{c, connQueryCtx{c}, connBeginTx{c}, connResetter{c}, connValidator{c}}
	}},
	{"Exec QueryContext", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connExec
			connQueryCtx
			connPinger
			connValidator
		}{c, connExec{c}, connQueryCtx{c}, connPinger{c}, connValidator{c}}
	}},
	{"ExecContext QueryContext", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connExecCtx
			connQueryCtx
			connPrepare
			connPinger
		}{c, connExecCtx{c}, connQueryCtx{c}, connPrepare{c}, connPinger{c}}
	}},
	{"checker", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connChecker
			connPrepare
			connBeginTx
			connPinger
		}{c, connChecker{c}, connPrepare{c}, connBeginTx{c}, connPinger{c}}
	}},
	{"checker Exec", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connChecker
			connExec
			connPrepare
			connValidator
		}{c, connChecker{c}, connExec{c}, connPrepare{c}, connValidator{c}}
	}},
	{"checker ExecContext", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connChecker
			connExecCtx
			connResetter
		}{c, connChecker{c}, connExecCtx{c}, connResetter{c}}
	}},
	{"checker Query", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connChecker
			connQuery
			connBeginTx
			connResetter
			connValidator
		}{c, connChecker{c}, connQuery{c}, connBeginTx{c}, connResetter{c}, connValidator{c}}
	}},
	{"checker Exec Query", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connChecker
			connExec
			connQuery
			connBeginTx
			connPinger
		}{c, connChecker{c}, connExec{c}, connQuery{c}, connBeginTx{c}, connPinger{c}}
	}},
	{"checker ExecContext Query", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connChecker
			connExecCtx
			connQuery
			connPrepare
			connResetter
			connValidator
		}{c, connChecker{c}, connExecCtx{c}, connQuery{c}, connPrepare{c}, connResetter{c}, connValidator{c}}
	}},
	{"checker QueryContext", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connChecker
			connQueryCtx
			connPrepare
		}{c, connChecker{c}, connQueryCtx{c}, connPrepare{c}}
	}},
	{"checker Exec QueryContext", func(c *fakeConn) driver.Conn {
		return struct {
			*fakeConn
			connChecker
			connExec
			connQueryCtx
			connPrepare
			connBeginTx
			connPinger
			connResetter
		}{c, connChecker{c}, connExec{c}, connQueryCtx{c}, connPrepare{c}, connBeginTx{c}, connPinger{c}, connResetter{c}}
	}},
	likeMySQL,
}

var likeMySQL = connShape{"like mysql", func(c *fakeConn) driver.Conn {
	return struct {
		*fakeConn
		connChecker
		connExec
		connExecCtx
		connQuery
		connQueryCtx
		connPrepare
		connBeginTx
		connPinger
		connResetter
		connValidator
	}{
		c,
		connChecker{c},
		connExec{c},
		connExecCtx{c},
		connQuery{c},
		connQueryCtx{c},
		connPrepare{c},
		connBeginTx{c},
		connPinger{c},
		connResetter{c},
		connValidator{c},
	}
}}

type stmtShape struct {
	name string
	make func(*fakeStmt) driver.Stmt
}

// stmtShapes has every triple. The last is that of go-sql-driver/mysql.
var stmtShapes = []stmtShape{
	{"nothing", func(t *fakeStmt) driver.Stmt { return t }},
	{"ExecContext QueryContext", func(t *fakeStmt) driver.Stmt {
		return struct {
			*fakeStmt
			stmtExecCtx
			stmtQueryCtx
		}{t, stmtExecCtx{t}, stmtQueryCtx{t}}
	}},
	{"ExecContext checker", func(t *fakeStmt) driver.Stmt {
		return struct {
			*fakeStmt
			stmtExecCtx
			stmtChecker
		}{t, stmtExecCtx{t}, stmtChecker{t}}
	}},
	{"ExecContext converter", func(t *fakeStmt) driver.Stmt {
		return struct {
			*fakeStmt
			stmtExecCtx
			stmtConverter
		}{t, stmtExecCtx{t}, stmtConverter{t}}
	}},
	{"QueryContext checker", func(t *fakeStmt) driver.Stmt {
		return struct {
			*fakeStmt
			stmtQueryCtx
			stmtChecker
		}{t, stmtQueryCtx{t}, stmtChecker{t}}
	}},
	{"QueryContext converter", func(t *fakeStmt) driver.Stmt {
		return struct {
			*fakeStmt
			stmtQueryCtx
			stmtConverter
		}{t, stmtQueryCtx{t}, stmtConverter{t}}
	}},
	{"checker converter", func(t *fakeStmt) driver.Stmt {
		return struct {
			*fakeStmt
			stmtChecker
			stmtConverter
		}{t, stmtChecker{t}, stmtConverter{t}}
	}},
	stmtLikeMySQL,
}

var stmtLikeMySQL = stmtShape{"like mysql", func(t *fakeStmt) driver.Stmt {
	return struct {
		*fakeStmt
		stmtExecCtx
		stmtQueryCtx
		stmtChecker
		stmtConverter
	}{t, stmtExecCtx{t}, stmtQueryCtx{t}, stmtChecker{t}, stmtConverter{t}}
}}

type rowsShape struct {
	name string
	make func(*fakeRows) driver.Rows
}

// rowsShapes has none, each alone, all, and those of go-sql-driver/mysql.
var rowsShapes = []rowsShape{
	{"nothing", func(r *fakeRows) driver.Rows { return r }},
	{"NextResultSet", func(r *fakeRows) driver.Rows {
		return struct {
			*fakeRows
			rowsSets
		}{r, rowsSets{r}}
	}},
	{"DatabaseTypeName", func(r *fakeRows) driver.Rows {
		return struct {
			*fakeRows
			rowsTypeName
		}{r, rowsTypeName{r}}
	}},
	{"ScanType", func(r *fakeRows) driver.Rows {
		return struct {
			*fakeRows
			rowsScanType
		}{r, rowsScanType{r}}
	}},
	{"Length", func(r *fakeRows) driver.Rows {
		return struct {
			*fakeRows
			rowsLength
		}{r, rowsLength{r}}
	}},
	{"Nullable", func(r *fakeRows) driver.Rows {
		return struct {
			*fakeRows
			rowsNullable
		}{r, rowsNullable{r}}
	}},
	{"PrecisionScale", func(r *fakeRows) driver.Rows {
		return struct {
			*fakeRows
			rowsPrecision
		}{r, rowsPrecision{r}}
	}},
	{"everything", func(r *fakeRows) driver.Rows {
		return struct {
			*fakeRows
			rowsSets
			rowsTypeName
			rowsScanType
			rowsLength
			rowsNullable
			rowsPrecision
		}{r, rowsSets{r}, rowsTypeName{r}, rowsScanType{r}, rowsLength{r}, rowsNullable{r}, rowsPrecision{r}}
	}},
	rowsLikeMySQL,
}

var rowsLikeMySQL = rowsShape{"like mysql", func(r *fakeRows) driver.Rows {
	return struct {
		*fakeRows
		rowsSets
		rowsTypeName
		rowsScanType
		rowsNullable
		rowsPrecision
	}{r, rowsSets{r}, rowsTypeName{r}, rowsScanType{r}, rowsNullable{r}, rowsPrecision{r}}
}}

// newFake returns a fake server that looks like go-sql-driver/mysql.
func newFake() *fakeServer {
	return &fakeServer{conn: likeMySQL.make, stmt: stmtLikeMySQL.make, rows: rowsLikeMySQL.make}
}

// mysqlAnswers makes the fake server answer the driver's own questions as a
// MySQL server does whose lock table is there, and the rest with fakeTable.
func (fs *fakeServer) mysqlAnswers() *fakeServer {
	fs.answer = func(c *fakeConn, text string) (fakeReply, error) {
		one := func(values ...driver.Value) (fakeReply, error) {
			return fakeReply{columns: slices.Repeat([]string{"c"}, len(values)), rows: [][]driver.Value{values}}, nil
		}
		switch {
		case strings.HasPrefix(text, "SELECT VERSION()"):
			return one(anyPrimary...)
		case strings.Contains(text, "@@completion_type"):
			return one(int64(c.id), "db 3306", int64(1), "NO_CHAIN")
		case strings.HasPrefix(text, "SELECT ENGINE"):
			return one("InnoDB", "namespace,name,owner,token,expires,versioned")
		case text == sqlHighWater:
			return one(int64(1))
		case text == sqlStripes:
			return fakeReply{columns: []string{"name", "token"}}, nil
		case strings.HasPrefix(text, "SELECT name, token FROM `shop`.`mysqllock`"):
			return one("", int64(0)) // the high-water mark alone
		case strings.Contains(text, "versioned, @@read_only"):
			reply, err := one(int64(c.id), int64(0), nil, int64(0), "0", "0")
			reply.rows = slices.Repeat(reply.rows, 1+strings.Count(text, "UNION ALL"))
			return reply, err
		case strings.HasPrefix(text, "SELECT IF("), strings.HasPrefix(text, "SELECT "+server.Untimed+"IF("): // a named lock, or a guard
			return one(int64(1))
		case strings.Contains(text, "CONNECTION_ID()"):
			return one(int64(c.id))
		}
		return fakeTable(), nil
	}
	return fs
}
