package mysqllock

import (
	"bytes"
	"database/sql/driver"
	"errors"
	"io"
	"reflect"
	"sync"
)

// bufferBytes is how much of a query's rows is read ahead in a unit of work,
// so that code which queries inside a rows.Next loop works as it does without
// a lock. What goes beyond is streamed.
const bufferBytes = 4 << 20

// rows are the rows of a query in a unit of work: read ahead, and where they
// are too many, with a tail that is still being read from the connection.
//
// It has every optional interface of driver.Rows. Where the base driver's rows
// lack one, the answers are those that database/sql gives in its absence.
type rows struct {
	sets []resultSet // read ahead; the first is the current one
	next int         // the next row of the current set

	mu    sync.Mutex
	tail  driver.Rows   // what is not read yet; nil when all is
	stmts []driver.Stmt // to be closed with the tail
	err   error         // why the tail was cut off
	done  func(error)   // called when the tail is over, with what went wrong
}

type resultSet struct {
	columns []column
	names   []string
	rows    [][]driver.Value
	partial bool // the tail goes on with it
}

type column struct {
	databaseType     string
	scanType         reflect.Type
	length           int64
	hasLength        bool
	nullable         bool
	hasNullable      bool
	precision, scale int64
	hasPrecision     bool
}

var (
	_ driver.RowsNextResultSet              = (*rows)(nil)
	_ driver.RowsColumnTypeDatabaseTypeName = (*rows)(nil)
	_ driver.RowsColumnTypeLength           = (*rows)(nil)
	_ driver.RowsColumnTypeNullable         = (*rows)(nil)
	_ driver.RowsColumnTypePrecisionScale   = (*rows)(nil)
	_ driver.RowsColumnTypeScanType         = (*rows)(nil)
)

// readAhead reads base until its end, or until limit bytes are held; limit 0
// means to the end. Rows that were read to the end are closed.
func readAhead(base driver.Rows, limit int) (*rows, error) {
	r := &rows{}
	if s, ok := base.(stmtRows); ok {
		base, r.stmts = s.Rows, []driver.Stmt{s.stmt}
	}
	r.tail = base
	held := 0
	for {
		set := describe(base)
		for {
			dest := make([]driver.Value, len(set.names))
			err := base.Next(dest)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				_ = r.Close()
				return nil, err
			}
			for i, v := range dest {
				held += 32
				switch v := v.(type) {
				case []byte:
					dest[i] = bytes.Clone(v) // the driver reuses its buffer
					held += len(v)
				case string:
					held += len(v)
				}
			}
			set.rows = append(set.rows, dest)
			if limit > 0 && held > limit {
				set.partial = true
				r.sets = append(r.sets, set)
				return r, nil
			}
		}
		r.sets = append(r.sets, set)
		more, ok := base.(driver.RowsNextResultSet)
		if !ok || !more.HasNextResultSet() {
			break
		}
		if err := more.NextResultSet(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			_ = r.Close()
			return nil, err
		}
	}
	return r, r.Close()
}

func describe(base driver.Rows) resultSet {
	set := resultSet{names: base.Columns()}
	set.columns = make([]column, len(set.names))
	for i := range set.columns {
		c := &set.columns[i]
		c.scanType = reflect.TypeFor[any]()
		if t, ok := base.(driver.RowsColumnTypeDatabaseTypeName); ok {
			c.databaseType = t.ColumnTypeDatabaseTypeName(i)
		}
		if t, ok := base.(driver.RowsColumnTypeScanType); ok {
			c.scanType = t.ColumnTypeScanType(i)
		}
		if t, ok := base.(driver.RowsColumnTypeLength); ok {
			c.length, c.hasLength = t.ColumnTypeLength(i)
		}
		if t, ok := base.(driver.RowsColumnTypeNullable); ok {
			c.nullable, c.hasNullable = t.ColumnTypeNullable(i)
		}
		if t, ok := base.(driver.RowsColumnTypePrecisionScale); ok {
			c.precision, c.scale, c.hasPrecision = t.ColumnTypePrecisionScale(i)
		}
	}
	return set
}

func (r *rows) Columns() []string { return r.sets[0].names }

func (r *rows) Next(dest []driver.Value) error {
	set := &r.sets[0]
	if r.next < len(set.rows) {
		copy(dest, set.rows[r.next])
		set.rows[r.next] = nil
		r.next++
		return nil
	}
	if !set.partial {
		return io.EOF
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tail == nil {
		return r.cut()
	}
	err := r.tail.Next(dest)
	if err != nil && !errors.Is(err, io.EOF) {
		_ = r.finish(err)
	}
	return err
}

func (r *rows) HasNextResultSet() bool {
	if !r.sets[0].partial {
		return len(r.sets) > 1
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	more, ok := r.tail.(driver.RowsNextResultSet)
	return ok && more.HasNextResultSet()
}

func (r *rows) NextResultSet() error {
	if !r.sets[0].partial {
		if len(r.sets) == 1 {
			return io.EOF
		}
		r.sets, r.next = r.sets[1:], 0
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	more, ok := r.tail.(driver.RowsNextResultSet)
	if !ok {
		return r.cut()
	}
	if err := more.NextResultSet(); err != nil {
		if !errors.Is(err, io.EOF) {
			_ = r.finish(err)
		}
		return err
	}
	set := describe(r.tail)
	set.partial = true
	r.sets, r.next = []resultSet{set}, 0
	return nil
}

// Close gives the connection back where rows are still being read from it.
func (r *rows) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.finish(nil)
}

// streaming reports whether rows are still being read from the connection.
func (r *rows) streaming() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tail != nil
}

// cutOff ends the tail because the connection is needed: a later Next fails
// with reason.
func (r *rows) cutOff(reason error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tail != nil {
		r.err = reason
	}
	return r.finish(nil)
}

func (r *rows) cut() error {
	if r.err != nil {
		return r.err
	}
	return io.EOF
}

// closeLater has stmt closed with the tail, whose packets are in its way; false
// where nothing is being read.
func (r *rows) closeLater(stmt driver.Stmt) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tail == nil {
		return false
	}
	r.stmts = append(r.stmts, stmt)
	return true
}

// finish closes the tail, which cause has ended early. The caller has mu.
func (r *rows) finish(cause error) error {
	if r.tail == nil {
		return nil
	}
	err := r.tail.Close()
	r.tail = nil
	if r.done != nil && err == nil {
		defer func(done func(error)) { done(cause) }(r.done)
	} else if r.done != nil {
		defer func(done func(error)) { done(err) }(r.done)
	}
	r.done = nil
	for _, s := range r.stmts {
		err = errors.Join(err, s.Close())
	}
	r.stmts = nil
	return err
}

func (r *rows) ColumnTypeDatabaseTypeName(i int) string { return r.sets[0].columns[i].databaseType }

func (r *rows) ColumnTypeScanType(i int) reflect.Type { return r.sets[0].columns[i].scanType }

func (r *rows) ColumnTypeLength(i int) (length int64, ok bool) {
	c := r.sets[0].columns[i]
	return c.length, c.hasLength
}

func (r *rows) ColumnTypeNullable(i int) (nullable, ok bool) {
	c := r.sets[0].columns[i]
	return c.nullable, c.hasNullable
}

func (r *rows) ColumnTypePrecisionScale(i int) (precision, scale int64, ok bool) {
	c := r.sets[0].columns[i]
	return c.precision, c.scale, c.hasPrecision
}
