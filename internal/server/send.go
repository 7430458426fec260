package server

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
)

var oneByOne atomic.Bool

// SetOneByOne says whether the driver's own statements go one by one to all connections of this process, also to those that take
// several in one text: for tests. Both ways mean the same.
func SetOneByOne(yes bool) { oneByOne.Store(yes) }

// OneByOne is what SetOneByOne was called with last.
func OneByOne() bool { return oneByOne.Load() }

// SendPacket runs texts as one text. The server stops at the first statement that fails, and err is that of the statement.
// answers has an element for each statement that is known to have come through: its rows, or nil if it returns none. A text
// that returns rows begins with SELECT or (SELECT, also behind MariaDB's SET STATEMENT … FOR, and returns one set of them.
//
// One text is quicker than several, also for two statements, and on the server's own machine. Measured on MySQL 9.7 and
// MariaDB 10.11: by 0 to 13 in a hundred for one goroutine that reads and writes a row under a lock, and by 7 to 39 for 16
// that want the same row.
//
// The client does not see which statement an error is of. An answer proves that all before it have come through, and so
// does a [Flavour.Guard] that stops the text, and the end of the text without an error. So between a COMMIT and what follows it
// there is a SELECT. An error without an answer behind COMMIT need not be that of COMMIT: a KILL can hit right after it.
//
// [ErrAnswers] says that the answers are not those of the texts.
func SendPacket(ctx context.Context, conn driver.Conn, texts ...string) (answers [][][]string, err error) {
	return SendBehind(ctx, conn, "", nil, texts...)
}

// SendBehind is SendPacket with a statement of the caller's in front, which returns no rows and has args. answers are
// those of texts: the first of them proves that the statement has come through. driver.ErrSkip says that
// conn does not put args into a text; nothing was sent then. The statement must be a whole one, whatever follows it.
func SendBehind(
	ctx context.Context, conn driver.Conn, statement string, args []driver.NamedValue, texts ...string,
) (answers [][][]string, err error) {
	defer func() { err = Unanswered(ctx, err) }()
	defer basedriver.Catch(conn, &err)
	p := join(statement, texts)
	if statement == "" { // else it is the caller's, for who listens
		ctx = purpose.Ours(ctx)
	}
	rows, err := basedriver.Query(ctx, conn, p.text, args)
	return p.read(rows, err)
}

// SendBetween is SendBehind with front before the statement: see [SendInFront], also for limit and answered. If front is
// not answered, err is what SendInFront returns.
func SendBetween(ctx context.Context, conn driver.Conn, limit time.Duration, front string, answered func([][]string) error,
	statement string, args []driver.NamedValue, texts ...string,
) (answers [][][]string, err error) {
	p := join(statement, texts)
	var behind error
	err = SendInFront(ctx, conn, limit, front, p.text, args, answered, func(rows driver.Rows, err error) {
		answers, behind = p.read(rows, err)
	})
	return answers, cmp.Or(err, behind)
}

// packet is a text of several statements.
type packet struct {
	text      string
	texts     []string
	answering []int // which of texts each result set proves
}

// join joins texts, with a statement in front; "" is none. For a write that ends a unit of work, with the
// count of its rows, COMMIT, and the lock for the next caller:
//
//	UPDATE products SET stock = 1 WHERE id = 42
//	; SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ ROW_COUNT() LIMIT 1; COMMIT; SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ 1;
//	SELECT /*+ SET_VAR(lock_wait_timeout = 1) */ owner, versioned
//	FROM mysqllock WHERE namespace = 'app' AND name = 'k' LIMIT 1 FOR UPDATE NOWAIT
func join(statement string, texts []string) packet {
	p := packet{texts: texts}
	var b strings.Builder
	if statement != "" {
		b.WriteString(statement + "\n; ")
	}
	for i, text := range texts {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(text)
		switch {
		case returnsRows(text):
			p.answering = append(p.answering, i)
		case text == "COMMIT" && i < len(texts)-1:
			b.WriteString("; " + came)
			p.answering = append(p.answering, i)
		}
	}
	p.text = b.String()
	return p
}

// read reads the answers, from the first result set on, and closes rows; or err is why there are none.
func (p packet) read(rows driver.Rows, err error) (answers [][][]string, _ error) {
	sets := 0
	if err == nil {
		answers, sets, err = p.readSets(rows)
		if cerr := rows.Close(); err == nil {
			err = cerr
		}
	}
	if Stopped(err) && sets < len(p.answering) {
		answers = append(answers, make([][][]string, p.answering[sets]-len(answers))...)
	}
	return answers, err
}

// prove adds what the result set number i proves to have come through.
func (p packet) prove(answers [][][]string, i int, set [][]string) [][][]string {
	at := p.answering[i]
	if !returnsRows(p.texts[at]) {
		set = nil
	}
	return append(append(answers, make([][][]string, at-len(answers))...), set)
}

// readSets also returns how many sets of rows have come.
func (p packet) readSets(rows driver.Rows) (answers [][][]string, sets int, err error) {
	for {
		if len(rows.Columns()) > 0 {
			set, err := readSet(rows, nil)
			if err != nil {
				return answers, sets, err
			}
			if sets == len(p.answering) {
				return answers, sets, fmt.Errorf("%w: more than %d", ErrAnswers, sets)
			}
			answers = p.prove(answers, sets, set)
			sets++
		}
		more, ok := rows.(driver.RowsNextResultSet)
		if !ok || !more.HasNextResultSet() {
			if sets == len(p.answering) && sets > 0 && p.answering[sets-1] < len(p.texts)-1 {
				return answers, sets, fmt.Errorf("%w: none to what follows the last one", ErrAnswers)
			}
			break
		}
		if err = more.NextResultSet(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return answers, sets, err
		}
	}
	if sets < len(p.answering) {
		return answers, sets, fmt.Errorf("%w: %d of %d", ErrAnswers, sets, len(p.answering))
	}
	return append(answers, make([][][]string, len(p.texts)-len(answers))...), sets, nil
}

// SendInFront runs text, which returns one set of rows, with a query of the caller's behind it that has args. The answer of text
// comes within limit; 0 is without one. If answered returns no error for it, read gets the rows of the query, to be read and closed, or the
// error that the server has for it. driver.ErrSkip is as for [SendBehind].
func SendInFront(ctx context.Context, conn driver.Conn, limit time.Duration, text, query string, args []driver.NamedValue,
	answered func([][]string) error, read func(driver.Rows, error),
) (err error) {
	own, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	answeredInTime := func() {}
	if limit > 0 {
		late := time.AfterFunc(limit, func() { cancel(Silence{limit}) })
		answeredInTime = func() { late.Stop() }
	}
	defer answeredInTime()
	defer func() { err = Unanswered(own, err) }()
	defer basedriver.Catch(conn, &err)
	rows, err := basedriver.Query(own, conn, text+"; "+query, args)
	if err != nil {
		return err
	}
	ours := true
	defer func() {
		if ours {
			if cerr := rows.Close(); err == nil {
				err = cerr
			}
		}
	}()
	set, err := readSet(rows, nil)
	if err != nil {
		return err
	}
	answeredInTime()
	if err := answered(set); err != nil {
		return err
	}
	more, ok := rows.(driver.RowsNextResultSet)
	if !ok || !more.HasNextResultSet() {
		return fmt.Errorf("%w: 1 of 2", ErrAnswers)
	}
	switch err := more.NextResultSet(); {
	case err == nil:
		ours = false
		read(rows, nil)
	case Number(err) != 0:
		read(nil, err)
	default:
		return err
	}
	return nil
}

// came, behind a COMMIT, proves that it has come through.
const came = "SELECT " + Untimed + "1"

// returnsRows reports whether a text returns a set of rows. On MariaDB a SELECT may have settings in front.
func returnsRows(text string) bool {
	if strings.HasPrefix(text, "SET STATEMENT ") {
		_, text, _ = strings.Cut(text, " FOR ")
	}
	return strings.HasPrefix(strings.TrimPrefix(text, "("), "SELECT")
}

// ErrAnswers says that several statements were sent as one text, and that the server, or a proxy in front of it,
// has answered another number of them: nobody knows which of them have run. It has no number of the server's.
var ErrAnswers = errors.New("unexpected number of answers to several statements in one text")

// SendSingly is SendPacket, one statement after the other.
func SendSingly(ctx context.Context, conn driver.Conn, texts ...string) (answers [][][]string, err error) {
	for _, text := range texts {
		var rows [][]string
		if returnsRows(text) {
			rows, err = Query(ctx, conn, text)
		} else {
			err = Exec(ctx, conn, text)
		}
		if err != nil {
			return answers, err
		}
		answers = append(answers, rows)
	}
	return answers, nil
}

// Guard is a statement that stops a text of several where the SQL expression condition is not true: it fails then,
// and those behind it do not run. Where it is true the answer is 1. For ROW_COUNT() = 2:
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ IF(ROW_COUNT() = 2, 1, (SELECT 1 UNION ALL SELECT 2)) LIMIT 1
func (f Flavour) Guard(condition string) string { return Ask(f.Require(condition)) }

// Ask is a statement that answers with SQL expressions, whatever limits the application has set: by sql_select_limit = 0 nothing
// would be evaluated.
func Ask(expressions string) string { return "SELECT " + Untimed + expressions + " LIMIT 1" }

// Rows answers with how many rows the statement before it has changed.
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ ROW_COUNT() LIMIT 1
var Rows = Ask("ROW_COUNT()")

// Require is an SQL expression that is 1 where condition is true. Else the statement fails.
func (f Flavour) Require(condition string) string {
	stop := "(SELECT 1 UNION ALL SELECT 2)" // as a value: error 1242
	if f.EagerSubqueries {
		stop = "JSON_EXTRACT(CONCAT('x', CONNECTION_ID()), '$')" // error 3140
	}
	return "IF(" + condition + ", 1, " + stop + ")"
}

// Stopped reports whether err is that of a [Flavour.Require] whose condition is not true.
func Stopped(err error) bool {
	n := Number(err)
	return n == severalRows || n == invalidJSON
}

// Counted is Rows where there are any. If there are none, it fails, in a way that no statement
// of a caller's does ([Unchanged]), so that those behind it do not run.
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ IF(ROW_COUNT() > 0, ROW_COUNT(), EXP(720.0424 + ROW_COUNT())) LIMIT 1
var Counted = Ask("IF(ROW_COUNT() > 0, ROW_COUNT(), EXP(" + tooLarge + " + ROW_COUNT()))")

// tooLarge is in the text of the error 1690 of Counted, which has the expression.
const tooLarge = "720.0424"

// Unchanged reports whether err is that of [Counted] behind a statement that has changed nothing.
func Unchanged(err error) bool {
	return Number(err) == outOfRange && strings.Contains(err.Error(), tooLarge+" + row_count()")
}

// Uncounted reports whether err may be that of [Counted], or of what else counts the rows of the statement before, which has
// come through then: a KILL or a limit on time can hit either, and so can a lack of memory.
func Uncounted(err error) bool {
	switch Number(err) {
	case QueryInterrupted, queryTimeout, statementTimeout, outOfMemory, outOfSortMemory, outOfResources, stackOverrun, capacityExceeded:
		return true
	}
	return false
}

// TakesPackets reports whether SendPacket and Guard do on conn what they promise: why is "" then. A guard has to stop
// a text, and one to let a text pass, by a statement that returns no rows, too. Afterwards no transaction is open. With
// an error conn is lost.
func (f Flavour) TakesPackets(ctx context.Context, conn driver.Conn) (why string, err error) {
	return takesPackets(ctx, conn, f.Guard)
}

func takesPackets(ctx context.Context, conn driver.Conn, guard func(string) string) (why string, err error) {
	fails := func(to string, answers [][][]string, err error) (string, error) {
		if Gone(err, conn) {
			return "", err
		}
		return fmt.Sprintf("a text of several statements that a guard is to %s is answered with %v (%v)", to, answers, err), nil
	}
	answers, err := SendPacket(ctx, conn, guard("NULL"), "SELECT 2")
	if Number(err) == 0 || Unparsed(err) || len(answers) > 0 {
		return fails("stop", answers, err)
	}
	answers, err = SendPacket(ctx, conn, guard("1 = 1"), "ROLLBACK", "SELECT 2")
	if err != nil || fmt.Sprint(answers) != "[[[1]] [] [[2]]]" {
		return fails("let pass", answers, err)
	}
	return "", nil
}
