package grpclock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/mysqllock/mysqllock"
	grpclock "github.com/mysqllock/mysqllock/integrations/grpc"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestMain(m *testing.M) {
	dbtest.Jobs{"hold": stock.Hold}.Run()
	os.Exit(tempserver.Tests{M: m}.Run())
}

// service takes a lock for each call.
type service struct {
	grpc_health_v1.UnimplementedHealthServer
	db *sql.DB
}

func (s *service) Check(ctx context.Context, _ *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	return &grpc_health_v1.HealthCheckResponse{}, s.lock(ctx)
}

func (s *service) Watch(_ *grpc_health_v1.HealthCheckRequest, stream grpc.ServerStreamingServer[grpc_health_v1.HealthCheckResponse]) error {
	return s.lock(stream.Context())
}

func (s *service) lock(ctx context.Context) error {
	return mysqllock.Do(ctx, s.db, "product:1", func(context.Context) error { return nil }, lockctx.NoWait())
}

// A client is told to come again while another process has the key.
func TestAClientOfATakenKeyMayComeAgain(t *testing.T) {
	dbtest.OnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
		server := grpc.NewServer(grpc.UnaryInterceptor(grpclock.Unary), grpc.StreamInterceptor(grpclock.Stream))
		grpc_health_v1.RegisterHealthServer(server, &service{db: d.Open("mysqllock")})
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		dbtest.OK(t, err)
		go func() { _ = server.Serve(listener) }()
		defer server.Stop()
		conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		dbtest.OK(t, err)
		defer conn.Close()
		client := grpc_health_v1.NewHealthClient(conn)
		check := func() error {
			_, err := client.Check(dbtest.Limited(t), &grpc_health_v1.HealthCheckRequest{})
			return err
		}
		dbtest.OK(t, check())
		other := dbtest.StartJob(t, "hold", d.DSN())
		if said := <-other.Said(); said != "holds" {
			t.Fatal(said)
		}
		wantBusy(t, check())
		stream, err := client.Watch(dbtest.Limited(t), &grpc_health_v1.HealthCheckRequest{})
		dbtest.OK(t, err)
		_, err = stream.Recv()
		wantBusy(t, err)
		other.Tell("end")
		if said := <-other.Said(); said != "ended <nil>" {
			t.Fatal(said)
		}
		dbtest.OK(t, check())
	})
}

func wantBusy(t *testing.T, err error) {
	t.Helper()
	s := status.Convert(err)
	if s.Code() != codes.Unavailable || len(s.Details()) != 1 {
		t.Fatalf("the client is told %v", s)
	}
	if info, ok := s.Details()[0].(*errdetails.RetryInfo); !ok || info.RetryDelay.AsDuration() <= 0 {
		t.Errorf("the client is told %v", s.Details())
	}
}

func TestErrorsWorthARetryHaveACode(t *testing.T) {
	of := func(op string, err error) error { return fmt.Errorf("selling: %w", &mysqllock.Error{Op: op, Err: err}) }
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{nil, codes.OK},
		{errors.New("sold out"), codes.OK},
		{of("lock", mysqllock.ErrUnsafe), codes.OK},
		{of("commit", mysqllock.ErrLost), codes.OK},
		{of("release", mysqllock.ErrLost), codes.OK},
		{of("statement", mysqllock.ErrLost), codes.Aborted},
		{of("commit", mysqllock.ErrConflict), codes.Aborted},
		{of("lock", mysqllock.ErrDeadlock), codes.Aborted},
		{of("lock", mysqllock.ErrLocked), codes.Unavailable},
		{of("lock", mysqllock.ErrTimeout), codes.Unavailable},
		{of("lock", mysqllock.ErrExhausted), codes.Unavailable},
		{of("lock", mysqllock.ErrNoAnswer), codes.Unavailable},
	} {
		if got, ok := grpclock.Code(c.err); got != c.want || ok != (c.want != codes.OK) {
			t.Errorf("%v: %v, %v, want %v", c.err, got, ok, c.want)
		}
		if err := grpclock.Error(c.err); c.want == codes.OK && !errors.Is(err, c.err) {
			t.Errorf("%v became %v", c.err, err)
		}
	}
}
